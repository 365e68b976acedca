"""Documents are correct: examples run, links resolve, versions agree.

An example is run when its fence says `test` after the language: ```python test, ```sh test. The
examples of one page run in order, in one empty folder, as a reader would try them. Those in Python
that follow one another share a process, which imports torch once; no example sees the names of
another.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import upstream

from dataplane.config import VERSION

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EXAMPLE = re.compile(r"^```(python|sh) test\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BUCKET = "s3://corpus/"
"""What examples may write to: a bucket of a real S3 server."""
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#]+)(?:#[^)]*)?\)")


def examples(page: Path) -> list[tuple[str, str]]:
    return EXAMPLE.findall(page.read_text())


RUN = """
import sys
for source in sys.argv[1:]:
    exec(compile(source, "<example>", "exec"), {"__name__": "__main__"})
"""


def programs(page: Path) -> Iterator[tuple[list[str], str]]:
    """What runs the examples of a page, one after the other, and their text."""
    for language, group in itertools.groupby(examples(page), key=lambda one: one[0]):
        texts = [text for _, text in group]
        if language == "python":
            yield [sys.executable, "-c", RUN, *texts], "\n".join(texts)
        else:
            for text in texts:
                yield ["bash", "-euo", "pipefail", "-c", text], text


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=title)
def test_the_examples_of_a_page_run(page, tmp_path, request):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DATAPLANE_")}
    environ |= {name: v for name, v in os.environ.items() if name.startswith("DATAPLANE_TEST_")}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    environ["HOME"] = str(tmp_path)
    if BUCKET in page.read_text():
        s3_server = request.getfixturevalue("s3_server")
        environ |= s3_server.environment()
        s3_server.client.create_bucket(Bucket="corpus")
    environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")  # or /tmp
    for program, text in programs(page):
        done = subprocess.run(
            program,
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        if done.returncode:
            pytest.fail(f"{title(page)}:\n{text}\n{done.stdout}\n{done.stderr}", pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_of_the_docs_have_targets(page):
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not broken


def test_the_changelog_has_this_version():
    assert f"## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_docs_list_all_exceptions_to_the_suites_of_others():
    page = (ROOT / "docs" / "datasets.md").read_text()
    told = dict(re.findall(r"^\| `(Test[^`]+)` \| (.+) \|$", page, re.MULTILINE))
    assert told == upstream.EXCEPTIONS
