"""Documents are correct: examples run, links and anchors resolve, versions agree.

An example is run when its fence says `test` after the language: ```python test, ```sh test. The
examples of one page run in order, in one empty folder, as a reader would try them. Those in Python
that follow one another share a process; no example sees the names of another. All processes of
Python are forked from one that has torch.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import pickle
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm import WarmPython

from dataplane import cli, settings
from dataplane.base.suffixes import BY_FORMAT
from dataplane.metrics.table import METRICS
from dataplane.model import errors
from dataplane.model.config import VERSION
from dataplane.transforms import mixture_options, pack_options

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *(
            page
            for folder in ("docs", "examples", "skills")
            for page in (ROOT / folder).rglob("*.md")
        ),
        *(*ROOT.glob("*.md"), ROOT / "llms.txt"),
    ]
)
EXAMPLE = re.compile(r"^```(python|sh) test\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEADLINE_S = 280
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#]*)(?:#([^)]*))?\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# Pages and tables that are generated from code do not count, nor do marks such as a table's bars.
WORDS_MAX = 36_000
GENERATED = re.compile(r"<!-- made by .*?<!-- end -->", re.DOTALL)
site = runpy.run_path(str(ROOT / "docs" / "build.py"))


def examples(page: Path) -> list[tuple[str, str]]:
    return EXAMPLE.findall(page.read_text())


def programs(page: Path) -> Iterator[tuple[str, list[str]]]:
    """What runs one after the other: a command, or examples in Python that share a process."""
    for language, group in itertools.groupby(examples(page), key=lambda example: example[0]):
        texts = [text for _, text in group]
        yield from [(language, texts)] if language == "python" else [("sh", [t]) for t in texts]


def run_python(python: WarmPython, folder: Path, environ: dict[str, str], texts: list[str]) -> str:
    """Return the output of these examples if they fail."""
    with tempfile.TemporaryFile("w+") as errors:
        script = [str(Path(__file__).with_name("page_examples.py")), str(folder), *texts]
        process = python.run(script, environ, errors.fileno())
        try:
            process.stdin.close()
            printed = process.stdout.read()
            status = process.wait(DEADLINE_S)
            errors.seek(0)
            return f"{printed}{errors.read()}\nexit status {status}" if status else ""
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def run_shell(folder: Path, environ: dict[str, str], text: str) -> str:
    """Return the output of this example if it fails."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    return done.stdout + f"\nexit status {done.returncode}" if done.returncode else ""


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def commands(tmp_path_factory, warm_torch: WarmPython) -> Path:
    """A folder with `python` and `dataplane`, which are forked, too."""
    folder = tmp_path_factory.mktemp("bin")
    warm_torch.executable(folder)
    dataplane = folder / "dataplane"
    dataplane.write_text(f'#!/bin/sh\nexec {folder}/python -P -m dataplane "$@"\n')
    dataplane.chmod(0o755)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=title)
def test_the_examples_of_a_page_run(page, tmp_path, warm_torch, commands):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DATAPLANE_")}
    environ |= {name: v for name, v in os.environ.items() if name.startswith("DATAPLANE_TEST_")}
    environ["PATH"] = (
        f"{commands}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    )
    environ["HOME"] = str(tmp_path)
    environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")  # or /tmp
    environ["OMP_NUM_THREADS"] = "1"  # threads that wait for each other would take turns
    for language, texts in programs(page):
        if language == "python":
            failure = run_python(warm_torch, tmp_path, environ, texts)
        else:
            failure = run_shell(tmp_path, environ, texts[0])
        if failure:
            example = "\n".join(texts)
            pytest.fail(f"{title(page)}:\n{example}\n{failure}", pytrace=False)


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_of_the_docs_have_targets(page):
    broken = []
    for link, anchor in LINK.findall(FENCED.sub("", page.read_text())):
        target = (page.parent / link) if link else page
        if not target.exists() or (anchor and anchor not in slugs(target)):
            broken.append(f"{link}#{anchor}")
    assert not broken


def options_of(name: str) -> set[str]:
    """The arguments of a class of dataplane_torch, without an import of torch."""
    if name in {"DataLoader", "ShardedIterableDataset"}:
        body = site["loader_class"]().body
        init = next(node for node in body if getattr(node, "name", "") == "__init__")
        own = {argument.arg for argument in [*init.args.args, *init.args.kwonlyargs]} - {
            "self",
            "dataset",
        }
        return own | site["option_docs"]().keys()
    module = pack_options if name == "Pack" else mixture_options
    return set(inspect.signature(getattr(module, name)).parameters)


def test_the_reference_has_every_argument_setting_command_error_metric_and_format():
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    rows = [f"| `{name}` |" for name in site["option_docs"]()]
    rows += [f"| `{name}` |" for name in settings.BY_NAME]
    rows += [f"\n## dataplane {name}\n" for name in cli.cli.commands]
    rows += [f"\n## {name}\n" for name, kind in vars(errors).items() if is_error(kind)]
    rows += [f"`{metric.name}`" for metric in METRICS]
    text = "\n".join(
        [
            *pages.values(),
            *((ROOT / "docs" / f"{name}.md").read_text() for name in ("metrics", "formats")),
        ]
    )
    assert [row for row in rows if row not in text] == []
    formats = (ROOT / "docs" / "formats.md").read_text()
    assert [
        name for name in BY_FORMAT if not re.search(rf"^\| \[?{name}\b", formats, re.MULTILINE)
    ] == []


def test_a_traceback_ends_with_what_to_do():
    for name in [name for name, kind in vars(errors).items() if is_error(kind)]:
        error = pickle.loads(pickle.dumps(getattr(errors, name)("what was wrong")))
        assert str(error) == "what was wrong"
        assert traceback.format_exception_only(error)[-1] == f"what to do: {error.remedy}\n"


def is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, errors.DataplaneError)


def unknown_flags(line: str) -> list[str]:
    """The commands and flags of a command line in a page that dataplane does not have."""
    words = line.split()
    command, group = None, cli.cli
    for word in words[1:]:
        if word in getattr(group, "commands", {}):
            command = group = group.commands[word]
    if command is None:
        name = words[1] if len(words) > 1 and words[1].isalpha() else ""
        return [] if not name or name.isupper() or name in {"bench", "--help"} else [name]
    known = {flag for option in [*command.params, *cli.cli.params] for flag in option.opts}
    flags = re.findall(r"(?<!\S)--[a-z][a-z-]*", line)
    return [flag for flag in flags if flag not in known | {"--help"}]


def calls(page: Path) -> Iterator[ast.Call]:
    for text in re.findall(
        r"^```python.*?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        yield from (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=title)
def test_a_page_names_nothing_that_does_not_exist(page):
    text = page.read_text()
    variables = {*settings.OTHER_VARIABLES, *(setting.variable for setting in settings.SETTINGS)}
    wrong = {
        name
        for name in re.findall(r"\bDATAPLANE_[A-Z_]+\b", text)
        if name not in variables and not settings._OF_OTHERS.fullmatch(name)
    }
    metrics = {metric.name for metric in METRICS} | {
        "dataplane_torch",
        "dataplane_bench",
        "dataplane_loader",
    }
    for name in re.findall(r"\bdataplane_[a-z0-9_]+\b", text):
        wrong |= {name} if re.sub("_(bucket|sum|count)$", "", name) not in metrics else set()
    for line in re.findall(r"(?:^|`)(dataplane [^`\n]+)", text, re.MULTILINE):
        wrong |= set(unknown_flags(line.split("#")[0].split("|")[0]))
    for call in calls(page):
        name = getattr(call.func, "id", "")
        if name in {"DataLoader", "Pack", "Source", "Mixture", "ShardedIterableDataset"}:
            wrong |= {key.arg for key in call.keywords if key.arg} - options_of(name)
    assert wrong - {"DATAPLANE_ALLOWED_URL"} == set()  # an example of a misspelt one


def test_navigation_names_every_page_once():
    names = [name for section in site["nav"]().values() for name in section.values()]
    assert sorted([*names, "index.md", "llms.txt"]) == sorted(site["pages"]())


def test_the_docs_grow_no_longer():
    texts = [page.read_text() for page in PAGES]
    written = [GENERATED.sub("", text) for text in texts if "<!-- docs/build.py writes" not in text]
    words = [word for text in written for word in text.split() if re.search(r"\w", word)]
    assert len(words) <= WORDS_MAX


def test_the_changelog_has_this_version():
    assert f"## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text()
