"""Write docs/reference and docs/migrate/names.md from the code, and with a folder's name the source of the site there.

`make docs` runs this, and then zensical. Navigation follows from SECTIONS, by the names of files.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from dataplane import cli, settings
from dataplane.commands.output import exit_code
from dataplane.model import errors
from dataplane.transforms import mixture_options, pack_options, stacks
from dataplane.transforms.steps import registry

ROOT = Path(__file__).resolve().parents[1]
# What a reader comes to do, and its pages; a page belongs to the first pattern that matches it.
SECTIONS = {
    "Start": ("start/*", "examples.md", "assistants.md"),
    "Migrate": ("migrate/names.md", "migrate/*"),
    "How to": ("howto/index.md", "howto/*", "trainers.md", "parallel.md"),
    "Reference": ("reference/*", "formats.md", "metrics.md", "order.md"),
    "Operate": (
        *("operations.md", "deploy.md", "security.md", "upgrading.md", "runbooks.md"),
        "performance.md",
    ),
    "Contribute": ("contributing.md", "architecture.md", "benchmarks.md", "decisions/*"),
    "Concepts": ("concepts.md", "**/*.md"),
}
# The order of the tabs, of which the first two patterns above are only the most particular ones.
TABS = ("Start", "Migrate", "How to", "Concepts", "Reference", "Operate", "Contribute")
# Pages of the top folder, and their names in the site.
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "examples/README.md": "examples.md",
    "skills/dataplane/SKILL.md": "assistants.md",
    "llms.txt": "llms.txt",
}
LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)#]+)((?:#[^)]*)?\))")
# Python-Markdown knows no fence with more than its language: "```python test".
FENCE = re.compile(r"^(```\w+) .+$", re.MULTILINE)


# -- reference -------------------------------------------------------------------------------


def module(path: str) -> ast.Module:
    """The source of a module, which imports torch if it is imported."""
    return ast.parse((ROOT / path).read_text())


def class_named(tree: ast.Module, name: str) -> ast.ClassDef:
    """A class of a module."""
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def loader_class() -> ast.ClassDef:
    """DataLoader."""
    return class_named(module("loaders/dataplane_torch/loader.py"), "DataLoader")


def line(text: str) -> str:
    """A text as one line, which a table can hold."""
    return " ".join(text.split()).replace("|", "\\|")


def option_docs() -> dict[str, str]:
    """What stands below each option's field, by name."""
    found = {}
    for path in ("loaders/dataplane_torch/options.py", "dataplane/transforms/options.py"):
        for group in module(path).body:
            if isinstance(group, ast.ClassDef) and group.name.endswith("Arguments"):
                for field, text in zip(group.body, group.body[1:], strict=False):
                    if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                        found[field.target.id] = inspect.cleandoc(text.value.value)
    return found


def arguments() -> Iterator[str]:
    """Arguments by group, as the docstring of DataLoader lists them; then methods and values."""
    loader, more = loader_class(), option_docs()
    yield (
        "`DataLoader` and `ShardedIterableDataset` over urls take these arguments, and torch's `drop_last` and `pin_memory`."
        " Over a torch Dataset, `DataLoader` takes torch's arguments ([datasets.md](../datasets.md)), `device` and"
        " `snapshot_every_n_steps`. [Other loaders' names](../migrate/names.md) are in Migrate."
    )
    for text in ast.get_docstring(loader).splitlines():
        argument = re.match(r"  (\w+(?:, \w+)*)(?:: ([\w, ]+?))?(?: = (\S+))?  +(.*)", text)
        if argument:
            names, kind, default, short = argument.groups()
            for name in names.split(", "):
                says = line(more.get(name, short))
                yield f"| `{name}` | {kind or ''} | {f'`{default}`' if default else ''} | {says} |"
        elif re.fullmatch(r"[A-Z][a-z ]+", text):
            yield f"\n## {text}\n\n| argument | type | default | meaning |\n|---|---|---|---|"
    yield "\n## Methods and attributes\n\n| name | meaning |\n|---|---|"
    for node in loader.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            says = ast.get_docstring(node).partition("\n\nRaises:")[0]
            is_value = any(getattr(mark, "id", "") == "property" for mark in node.decorator_list)
            names = ", ".join(argument.arg for argument in node.args.args[1:])
            yield f"| `{node.name}{'' if is_value else f'({names})'}` | {line(says)} |"
    values = [mixture_options.Mixture, mixture_options.Source, pack_options.Pack, stacks.Stack]
    for value in [*values, *(getattr(registry, name) for name in registry.__all__)]:
        given = ", ".join(
            name if one.default is one.empty else f"{name}={one.default!r}"
            for name, one in inspect.signature(value).parameters.items()
        )
        says = re.split("\n\n(?:Raises|Source):", inspect.getdoc(value))[0]
        yield f"\n## {value.__name__}\n\n```text\n{value.__name__}({given})\n```\n\n{says}"


def settings_page() -> Iterator[str]:
    """A table of all settings."""
    yield (
        "A setting has one name everywhere: `--slab-bytes` as a flag of `dataplane serve`, `DATAPLANE_SLAB_BYTES` in the"
        " environment, `slab_bytes` in `dataplane.toml`. A flag beats a variable, and a variable the file. `dataplane config"
        " show` prints each value on this machine and where it came from. A trainer that starts its own node reads the"
        " variables and the file.\n\n| setting | default | values | meaning |\n|---|---|---|---|"
    )
    for setting in settings.SETTINGS:
        default = "from the machine"
        if "fixed" in setting.default.__qualname__:
            value = setting.default(None, {})
            default = f"`{setting.kind.show(value)}`" if value != "" else "not set"
        says = (default, setting.kind.allowed, setting.meaning)
        yield f"| `{setting.name}` | {' | '.join(line(text) for text in says)} |"
    others = ", ".join(f"`{name}`" for name in sorted(settings.OTHER_VARIABLES))
    yield f"\nOther variables: {others}."


def helps(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    """The help of a command and of those below it, by name."""
    context = click.Context(command, info_name=name, terminal_width=100, max_content_width=100)
    yield name, command.get_help(context)
    for below in getattr(command, "commands", {}).values():
        yield from helps(below, f"{name} {below.name}")


def commands() -> Iterator[str]:
    """The help of each command."""
    yield "`pip install dataplane-bench` adds `dataplane bench`."
    for name, text in helps(cli.cli, "dataplane"):
        if name != "dataplane":
            yield f"\n## {name}\n\n```text\n{text}\n```"


def errors_page() -> Iterator[str]:
    """Each class of errors: its cause, and what to do."""
    yield (
        "Every error that Dataplane raises deliberately is a `DataplaneError`. The message says what was wrong, and where. The"
        " error has details as attributes, such as `error.shard`: None means unknown. Tracebacks and commands also print the"
        ' advice of this page ("what to do").'
    )

    def tree(kind: type[errors.DataplaneError]) -> Iterator[str]:
        cause, _, nouns = line(inspect.getdoc(kind)).partition(" Nouns: ")
        yield f"\n## {kind.__name__}\n\n{cause}\n\n- What to do: {kind.remedy}."
        if nouns:
            yield f"- Attributes: {nouns.rstrip('.')}."
        if kind is not errors.DataplaneError:
            yield f"- Base class: `{kind.__base__.__name__}`."
        yield f"- Exit status of `dataplane`: {exit_code(kind(''))}."
        for below in kind.__subclasses__():
            if below.__module__ == errors.__name__:
                yield from tree(below)

    yield from tree(errors.DataplaneError)


STATE = {
    "version": "the version of the state's format",
    "spec_digest": "a hash of the job: dataset, options and seed",
    "epoch": "the epoch, from 0",
    "cursor": "how many samples of this epoch all ranks together have consumed",
    "sample_count": "how many samples the epoch has",
    "order": "the version of the [order](../order.md)",
    "options": "the options that differ from their defaults; long values as hashes",
    "dataset": "two hashes of the shards: `content` covers their ETags, `layout` does not",
    "values": "the full values of options whose hashes are in `options`",
    "pixels": "the software that decoded the images",
    "in_last_step": "true if the state was taken in the last step of the previous epoch",
    "digest": "a digest of all rows so far, to compare with another run's",
    "mixture": "the weights of a mixture, and all their changes",
    "ledger": "the last entry of the job's [ledger](../ledger.md) on which the run depends",
    "global_batch": "how many samples each step had",
    "taken_out": "rows and shards that `loader.tombstone()` took out, each with the epoch and cursor of its removal",
    "ahead": 'with `change="finish"`: a hash of the new recipe, which the run uses after this epoch',
    "stages": "the former stages of a run whose recipe has changed",
    "schedule": "with `stages=`: how many steps of the present stage are done, and the present and later stages",
}


def states() -> Iterator[str]:
    """The keys of a state."""
    yield (
        "`loader.state_dict()` over urls is a dict of plain values of about a kilobyte, the same on every rank. A loader"
        " with equal options and dataset accepts the state, on any number of ranks. Any other loader raises an error that names"
        " each difference ([training.md](../training.md#resume)). Keys after `dataset` are present only if they apply; unknown keys"
        " are ignored. A state over a torch Dataset has the states of its workers and samplers instead"
        " ([datasets.md](../datasets.md)).\n\n| key | value |\n|---|---|"
    )
    state = class_named(module("dataplane/client/state.py"), "RunState")
    method = next(node for node in state.body if getattr(node, "name", "") == "to_dict")
    keys = [node.value for node in ast.walk(method) if isinstance(node, ast.Constant)]
    yield from (f"| `{key}` | {says} |" for key, says in STATE.items() if key in keys)


def other_names() -> Iterator[str]:
    """A table of the arguments of other loaders, and links to the pages about these."""
    loaders = sorted((ROOT / "docs" / "migrate").glob("*.md"))
    links = [
        f"[{title(page).removeprefix('From ')}]({page.name})"
        for page in loaders
        if page.stem != "names"
    ]
    yield (
        "Names that other loaders use, and the names to use here. Errors about unknown arguments give the same advice. Code side by side:"
        f" {', '.join(links)}.\n\n| they have | here |\n|---|---|"
    )
    tree = module("loaders/dataplane_torch/options.py")
    (text,) = (
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "OTHER_NAMES"
    )
    for row in re.split(r"\n(?=\w)", text):
        names, _, use = line(row).partition(": ")
        names = ", ".join(f"`{name}`" for name in names.split())
        use = re.sub(r"[(]docs/([^)]+)[)]", r"([more](../\1))", use)
        yield f"| {names} | {use} |"


def reference() -> dict[str, str]:
    """The pages of docs that are made from the code, by their names."""
    parts = {
        "reference/arguments": ("Arguments of a loader", arguments()),
        "reference/settings": ("Settings", settings_page()),
        "reference/commands": ("Commands", commands()),
        "reference/errors": ("Errors", errors_page()),
        "reference/states": ("States", states()),
        "migrate/names": ("Arguments of other loaders", other_names()),
    }
    note = "<!-- docs/build.py writes this page from the code: run it after a change there. -->"
    return {
        f"{name}.md": f"# {heading}\n\n{note}\n\n" + "\n".join(lines).rstrip() + "\n"
        for name, (heading, lines) in parts.items()
    }


# -- site ------------------------------------------------------------------------------------


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
    left = {name: path for name, path in pages().items() if name not in {"index.md", "llms.txt"}}
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
        target, docs = (page.parent / match[2]).resolve(), ROOT / "docs"
        if target not in names and not target.is_relative_to(docs):
            return match[0]
        name = names.get(target) or target.relative_to(docs).as_posix()
        return match[1] + "../" * names[page].count("/") + name + match[3]

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
            target.parent.mkdir(exist_ok=True)
            shutil.copy(picture, target)
    (folder / "zensical.toml").write_text(configuration())


if __name__ == "__main__":
    for name, text in reference().items():
        (ROOT / "docs" / name).write_text(text)
    if sys.argv[1:]:
        write(Path(sys.argv[1]))
