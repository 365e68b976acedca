"""Write the site's source: the pages of docs/ and the top folder, and zensical's configuration.

`make docs` runs this, and then zensical. Navigation follows from SECTIONS, by the names of files.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What a reader comes to do, and its pages; a page belongs to the first pattern that matches it.
SECTIONS = {
    "Start": ("start/*",),
    "Migrate": ("migrate/*",),
    "How to": (
        *("howto/*", "language-models.md", "lightning.md", "accelerate.md", "transformers.md"),
        "parallel/*",
    ),
    "Reference": ("reference/*", "formats.md", "metrics.md", "order.md"),
    "Operate": (
        *("operations.md", "deploy.md", "security.md", "upgrading.md", "runbooks.md"),
        "performance.md",
    ),
    "Contribute": ("contributing.md", "architecture.md", "benchmarks.md", "decisions/*"),
    "Concepts": ("**/*.md",),
}
# The order of the tabs, of which the first two patterns above are only the most particular ones.
TABS = ("Start", "Migrate", "How to", "Concepts", "Reference", "Operate", "Contribute")
# Pages of the top folder, and their names in the site.
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)#]+)((?:#[^)]*)?\))")
# Python-Markdown knows no fence with more than its language: "```python test".
FENCE = re.compile(r"^(```\w+) .+$", re.MULTILINE)


def pages() -> dict[str, Path]:
    """Every page, by its name in the site."""
    found = {
        path.relative_to(ROOT / "docs").as_posix(): path for path in (ROOT / "docs").rglob("*.md")
    }
    return {name: ROOT / top for top, name in MOVED.items()} | dict(sorted(found.items()))


def title(page: Path) -> str:
    """The first heading, without marks."""
    return re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)[1].replace("`", "")


def nav() -> dict[str, dict[str, str]]:
    """The pages of each section, by their titles."""
    left = {name: path for name, path in pages().items() if name != "index.md"}
    left["changes.md"], sections = left.pop("changes.md"), {}
    for section, patterns in SECTIONS.items():
        for pattern in patterns:
            for name in [n for n in left if Path(n).match(pattern) or pattern == "**/*.md"]:
                sections.setdefault(section, {})[title(left.pop(name))] = name
    return {tab: sections[tab] for tab in TABS if tab in sections}


def moved(text: str, page: Path) -> str:
    """The text with links and fences as the site has them."""
    names = {path: name for name, path in pages().items()}

    def link(match: re.Match[str]) -> str:
        target = (page.parent / match[2]).resolve()
        if target not in names:
            return match[0]
        depth = names[page].count("/")
        return match[1] + "../" * depth + names[target] + match[3]

    return LINK.sub(link, FENCE.sub(r"\1", text))


def configuration() -> str:
    """zensical's configuration: nothing comes from the network, not even fonts."""
    sections = ", ".join(
        "{ %s = [%s] }"
        % (
            json.dumps(section),
            ", ".join(f"{{ {json.dumps(t)} = {json.dumps(name)} }}" for t, name in found.items()),
        )
        for section, found in nav().items()
    )
    return f"""[project]
site_name = "Dataplane"
docs_dir = "pages"
site_dir = "site"
use_directory_urls = false
nav = [{{ "Dataplane" = "index.md" }}, {sections}]
plugins = ["search"]
[project.theme]
font = false
features = ["navigation.tabs", "navigation.footer", "content.code.copy", "search.highlight"]
[project.markdown_extensions]
admonition = {{}}
attr_list = {{}}
pymdownx.highlight = {{}}
pymdownx.superfences = {{}}
toc.permalink = true
toc.slugify = {{ object = "pymdownx.slugs.slugify", kwds = {{ case = "lower" }} }}
"""


def write(folder: Path) -> None:
    """Write the source of the site into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, path in pages().items():
        target = folder / "pages" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(moved(path.read_text(), path))
    for picture in (ROOT / "docs").rglob("*"):
        if picture.suffix in {".png", ".svg"}:
            target = folder / "pages" / picture.relative_to(ROOT / "docs")
            shutil.copy(picture, target)
    (folder / "zensical.toml").write_text(configuration())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
