# Every task of developers and CI. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
SOURCES := dataplane loaders benchmarks tests
PROTOS := $(wildcard proto/dataplane/rpc/v1/*.proto)
IN_C := $(wildcard $(addprefix dataplane/,*.h worker/*.[ch] plan/*.[ch] formats/*.[ch] store/*.[ch] transforms/*/*.[ch]))
# Generated code asks for the versions that generate it, or newer ones: here the oldest that pyproject.toml allows.
PROTOC := $(VENV)/bin/uv run --quiet --no-project --isolated --python $(PY) --with grpcio-tools==1.80.0 \
  python -m grpc_tools.protoc -I proto
# pip compiles every module of every package, for a minute; Python keeps those that are imported, where it may.
COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
TEST_ARGS ?=
JOBS ?= 4
DIST ?= dist
# The pip that comes with Python takes twice as long to choose among releases. Without a newer one, it does.
PIP := pip==26.3
# torch is pinned here and not by `make lock`: a range may bring gigabytes for accelerators.
TORCH := torch==2.13.0

.PHONY: help setup wheel release lock test test-slow test-others sanitize lint dead format types imports protos protos-check docs check examples observe demo clean

help: ## list these targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1|\2/p' Makefile | column -t -s '|'

setup: $(READY) ## install everything that other targets need into .venv (quick when nothing changed)
	@:

# The project itself is installed last, as a plain path, without asking a registry for anything.
# This compiles the C sources; if it fails, the last line says what is missing. Without a C compiler, PyPI has one.
$(READY): requirements.lock pyproject.toml benchmarks/pyproject.toml $(IN_C) dataplane/base/build_kernels.py
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make setup: Python 3.11 or newer is needed, and '$(PYTHON)' is not." >&2; \
	  echo "Install one and name it: make setup PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make setup: '$(PYTHON)' lacks its venv module." >&2; \
	  echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PY) -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || "$(PYTHON)" -m venv --clear $(VENV)
	-@$(PY) -m pip install --quiet --disable-pip-version-check --no-compile "$(PIP)"
	$(PY) -m pip install --quiet --disable-pip-version-check $(COMPILE) -r requirements.lock
	@zig="$$($(PY) -c 'from dataplane.base.build_kernels import ZIG, has_compiler as has; print("" if has() else ZIG)')"; \
	[ -z "$$zig" ] || { echo "make setup: there is no C compiler; installing $$zig"; \
	  $(PY) -m pip install --quiet --disable-pip-version-check $(COMPILE) "$$zig"; }
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . -e benchmarks
	@$(PY) -m dataplane.base.build_kernels
	$(if $(PYTHONDONTWRITEBYTECODE),@$(PY) -m compileall -q dataplane loaders)
	@touch $@

# A wheel contains the libjpeg-turbo of Pillow's wheel for the same machine. The compiler of ziglang makes wheels for
# machines of another kind than this; only the headers of libjpeg-turbo come from this machine, hence -idirafter.
MACHINES ?= x86_64 aarch64
ZIG_CC = $(CURDIR)/$(PY) -m ziglang cc -mcpu=baseline -target
HEADERS := $(foreach folder,/usr/include /usr/include/$(shell uname -m)-linux-gnu,-idirafter $(folder))
wheel: setup ## wheels into dist/: dataplane-bench, and dataplane-loader for MACHINES (x86_64 and aarch64), with libjpeg-turbo
	@raw="$$(mktemp -d)"; trap 'rm -rf "$$raw"' EXIT; pip="$(PY) -m pip --quiet --disable-pip-version-check"; \
	$(VENV)/bin/uv build --quiet --sdist --no-build-isolation --python $(PY) -o "$$raw" .; \
	for machine in $(MACHINES); do \
	  made="$$raw/$$machine"; export PORTABLE_WHEEL="$$made/pillow" _PYTHON_HOST_PLATFORM="linux-$$machine"; \
	  $$pip download --no-deps --only-binary=:all: --platform "manylinux_2_28_$$machine" -c requirements.lock -d "$$made" pillow; \
	  $(PY) -m zipfile -e "$$made"/pillow-*.whl "$$PORTABLE_WHEEL"; \
	  ( if [ "$$machine" != "$$(uname -m)" ]; then \
	      $$pip install $(COMPILE) "$$($(PY) -c 'from dataplane.base.build_kernels import ZIG; print(ZIG)')"; \
	      export CC="$(ZIG_CC) $$machine-linux-gnu.2.17" CFLAGS="$(HEADERS)"; \
	    fi; \
	    $$pip wheel --no-deps --no-build-isolation -w "$$made/raw" "$$raw"/dataplane_loader-*.tar.gz ); \
	  LD_LIBRARY_PATH="$$PORTABLE_WHEEL/pillow.libs" PATH="$$PWD/$(VENV)/bin:$$PATH" \
	    $(PY) -m auditwheel repair -w "$(DIST)" "$$made"/raw/*.whl; \
	done; \
	$$pip wheel --no-deps --no-build-isolation -w "$(DIST)" ./benchmarks

SBOM := $(VENV)/bin/uv run --quiet --no-project --isolated --python $(PY) --with cyclonedx-bom==7.3.0 cyclonedx-py
release: setup ## sdists, wheels, an SBOM of what the loader installs, and checksums into dist/; tags this commit
	@[ -z "$$(git status --porcelain)" ] || { echo "make release: commit first" >&2; exit 1; }
	@rm -rf "$(DIST)"; $(MAKE) wheel; \
	$(VENV)/bin/uv build --quiet --sdist --no-build-isolation --python $(PY) -o "$(DIST)" .; \
	$(VENV)/bin/uv build --quiet --sdist --no-build-isolation --python $(PY) -o "$(DIST)" benchmarks; \
	rm -f "$(DIST)"/.gitignore; \
	fresh="$$(mktemp -d)"; trap 'rm -rf "$$fresh"' EXIT; "$(PYTHON)" -m venv "$$fresh"; \
	"$$fresh/bin/python" -m pip install --quiet --disable-pip-version-check "$(DIST)"/dataplane_loader-*_$$(uname -m).whl; \
	"$$fresh/bin/python" -c 'import sys; from dataplane.transforms.pixels_library import maker; sys.exit(maker().missing or 0)'; \
	version="$$("$$fresh/bin/dataplane" --version | sed 's/.* //')"; \
	$(SBOM) environment --output-reproducible --of JSON -o "$(DIST)/dataplane_loader-$$version.cdx.json" "$$fresh/bin/python"; \
	(cd "$(DIST)" && sha256sum * > SHA256SUMS && cat SHA256SUMS); \
	git tag -a "v$$version" -m "Dataplane $$version"; \
	echo "Tagged v$$version. To publish: git push origin v$$version, and upload $(DIST)/*.whl and $(DIST)/*.tar.gz."

lock: ## choose the newest versions that both pyproject.toml allow, and write requirements.lock
	fresh="$$(mktemp -d)"; trap 'rm -rf "$$fresh"' EXIT; \
	"$(PYTHON)" -m venv "$$fresh"; \
	"$$fresh/bin/python" -m pip install --quiet --disable-pip-version-check '.[torch,dev,frameworks]' ./benchmarks $(TORCH); \
	{ sed '/^[^#]/,$$d' requirements.lock; \
	  "$$fresh/bin/python" -m pip freeze --exclude dataplane-loader --exclude dataplane-bench \
	  | sed -E 's/^(torch==[^+]*)\+.*/\1/' | grep -vE '^(nvidia|cuda|triton)'; } > "$$fresh/lock"; \
	cp "$$fresh/lock" requirements.lock

test: setup ## run every test, four at a time (JOBS=1: one): they wait a third of their time
	$(PY) -m pytest -n $(JOBS) --dist worksteal --durations=10 $(TEST_ARGS)

# Runs in a copy of the tree, whose libraries end the process at the first invalid access.
# Python's own memory comes from malloc, so that the sanitizers check its bounds, too.
SANITIZED := build/sanitized
SANITIZER := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1
IN_C_TESTS := tests/worker/test_kernel.py tests/worker/test_packing.py tests/plan/test_packs.py tests/worker/test_gather.py \
  tests/plan/test_order.py \
  tests/formats/test_parquet_facts.py tests/store/test_receiving.py $(wildcard tests/transforms/test_pixels*.py) tests/transforms/test_added_steps.py
MUTANTS ?= 100000

sanitize: setup ## the tests of all C, and damaged JPEGs (MUTANTS), under gcc's sanitizers
	@rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	@tar -c --exclude='*.so' --exclude=__pycache__ $(SOURCES) pyproject.toml | tar -xC $(SANITIZED)
	@cd $(SANITIZED) && export CI=1 PYTHON="$(CURDIR)/$(PY)" CC="$${CC:-gcc}" PYTHONPATH="$$PWD"; \
	CFLAGS="$(SANITIZER)" $$PYTHON -m dataplane.base.build_kernels; \
	export LD_PRELOAD="$$($$CC -print-file-name=libasan.so) $$($$CC -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  PYTHONMALLOC=malloc ARROW_DEFAULT_MEMORY_POOL=system; \
	$$PYTHON -m pytest -q -p no:cacheprovider $(IN_C_TESTS); \
	$$PYTHON tests/mutated_jpegs.py --count $(MUTANTS)

test-slow: setup ## the tests that take minutes, which `make test` leaves out
	$(PY) -m pytest -m slow $(TEST_ARGS)

test-others: setup ## the fast tests and the demo on newer Pythons, with the oldest and the newest packages
	@rm -rf .others/wheel; $(MAKE) wheel DIST=.others/wheel MACHINES="$$(uname -m)"
	$(PY) tests/other_versions.py $(OTHERS_ARGS) .others/wheel/*.whl

lint: setup ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

dead: setup ## find unused names (exceptions: [tool.vulture] in pyproject.toml)
	$(VENV)/bin/vulture

format: setup ## fix lint findings and format with ruff
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: setup ## mypy, strict, of the packages and of the scripts in benchmarks
	$(PY) -m mypy

imports: setup ## which rooms may import which (the contracts are in pyproject.toml)
	$(VENV)/bin/lint-imports --no-logo

protos: setup ## generate dataplane/rpc/v1 from proto/
	$(PROTOC) --python_out=. --pyi_out=. $(PROTOS)

protos-check: setup ## check that the committed generated code is current
	@fresh="$$(mktemp -d)"; trap 'rm -rf "$$fresh"' EXIT; \
	$(PROTOC) --python_out="$$fresh" --pyi_out="$$fresh" $(PROTOS); \
	diff -r --exclude=__init__.py --exclude=__pycache__ "$$fresh/dataplane/rpc/v1" dataplane/rpc/v1 \
	  || { echo "dataplane/rpc/v1 is not what proto/ says: run 'make protos' and commit." >&2; exit 1; }

SITE := build/docs
docs: setup ## the documentation as a site, in build/docs/site; fails at a broken link or anchor
	@$(PY) docs/build.py $(SITE)
	@cd $(SITE) && "$(CURDIR)/$(VENV)/bin/uv" run --quiet --no-project --isolated \
	  --python "$(CURDIR)/$(PY)" --with zensical==0.0.73 zensical build --strict
	@! grep -rlE '(src|href)="https?://[^"]*\.(js|css|woff2?)"' $(SITE)/site \
	  || { echo "the site needs the network: see the files above" >&2; exit 1; }
	@echo "read it: $(PY) -m http.server --directory $(SITE)/site"

check: lint types imports dead protos-check test ## all that CI checks

observe: setup ## a small job under Debian's Prometheus, with our alert rules; prints where to look
	$(PY) deploy/prometheus/observe.py

examples: setup ## train five small models on data that they make, two minutes on a CPU
	@rm -rf example-runs
	@for script in language_model images detection recommender finetune; do \
	  echo "== examples/$$script.py"; $(PY) examples/$$script.py; done

demo: setup ## shards in S3 -> two DDP ranks -> SIGKILL -> exact resume, with proof
	$(PY) -m dataplane_bench.demo

clean: ## remove all generated files and .venv
	rm -rf $(VENV) .others dataplane/worker/libkernel.so dataplane/plan/libloops.so dataplane/formats/libparquet_facts.so dataplane/store/libreceive.so dataplane/transforms/libpixels.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .demo dist build
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
