"""`dataplane bench`: the command line of the benchmark."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dataplane.base import units
from dataplane.commands import output
from dataplane.commands.options import json_option
from dataplane.model.errors import ConfigError
from dataplane_bench.machine import bench_folder

_DELAY_MS_MAX = 10_000
_FILE = click.Path(dir_okay=False, path_type=Path)


class _Bar:
    """Shows the progress of the contest: a bar on a terminal, lines elsewhere. Keeps all notes."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("preparing", total=None)
        self._begun = 0

    def planned(self, trials: int) -> None:
        total = (self._progress.tasks[0].total or 0) + trials
        self._progress.update(self._task, total=total)

    def trial(self, what: str) -> None:
        self._progress.update(self._task, description=what, completed=self._begun)
        self._begun += 1
        if not self._progress.console.is_terminal:
            self.note(what)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _bar() -> Iterator[_Bar]:
    console = output.stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield _Bar(progress)


@click.command()
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option(
    "--peers",
    default="torch",
    show_default=True,
    metavar="NAMES",
    help="Loaders to compare with, separated by commas; all: every installed one; none.",
)
@click.option(
    "--scenario",
    "scenarios",
    multiple=True,
    metavar="NAME[/CASE]",
    help="What to measure; may be repeated. all: everything. Default: each workload, from disk.",
)
@click.option(
    "--workload",
    default="tokens",
    show_default=True,
    type=click.Choice(["tokens", "images", "tabular", "text"]),
    help="Workload of the scenarios about ranks, jobs, starts and steps.",
)
@click.option(
    "--ranks",
    default=4,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Ranks of the ranks scenario, jobs of the jobs scenario.",
)
@click.option(
    "--rounds",
    default=3,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Number of rounds; each system has one turn per round.",
)
@click.option(
    "--window",
    "window_s",
    default=1.5,
    show_default=True,
    type=click.FloatRange(0.2, 600),
    metavar="SECONDS",
    help="Duration of the measured window of a turn.",
)
@click.option(
    "--scale",
    type=click.FloatRange(0.01, 100),
    help="Size of the generated samples; 1 is about 0.5 GB of tokens. Default: 1, or 8 to 20 if "
    "all cases of a workload are s3-cold or s3-steady.",
)
@click.option(
    "--batch-size", type=click.IntRange(1, 1 << 20), help="Batch size for your own samples."
)
@click.option(
    "--limit",
    "byte_limit",
    default="1GiB",
    show_default=True,
    metavar="BYTES",
    help="How much of your own samples to copy and compare.",
)
@click.option(
    "--s3-delay",
    "s3_delay_ms",
    default="20",
    show_default=True,
    callback=lambda _, __, text: _delays(text),
    metavar="MS[,MS]...",
    help="Delay added to every request to the S3 server; several are measured in turn.",
)
@click.option("--s3-tls", is_flag=True, help="Read from the S3 server over TLS as well as plain.")
@json_option
@click.option("--markdown", is_flag=True, help="Write the tables as Markdown to stdout.")
@click.option("--html", type=_FILE, metavar="FILE", help="Write the report as a page with plots.")
@click.option("--compare", type=_FILE, metavar="OLD.json", help="Compare with an older report.")
@click.option(
    "--report", "shown", type=_FILE, metavar="REPORT.json",
    help="Measure nothing, and show this report.",
)  # fmt: skip
@click.option(
    "--install-peer",
    "installs",
    multiple=True,
    metavar="NAME",
    help="Create a peer's own environment, and exit. May be repeated; all: every peer.",
)
@click.option("--list", "listing", is_flag=True, help="List scenarios and peers, and exit.")
@click.option("--clean", is_flag=True, help="Remove generated and converted samples, and exit.")
def bench(**given: Any) -> None:
    """Measure this loader and others on the same samples, in turns, in one run.

    Without URL it makes its own samples (about 1 GB under ~/.cache/dataplane/bench), and takes
    about four minutes. With URL it copies some of your shards and compares on those.

    \b
    dataplane bench                                   tokens, images, a table, text; with torch
    dataplane bench --install-peer webdataset         then: --peers torch,webdataset
    dataplane bench --scenario ranks --ranks 4
    dataplane bench s3://bucket/train/ --peers all --html report.html
    dataplane bench --json > old.json                 later: --compare old.json
    """
    if given["listing"]:
        _list(as_json=given["as_json"])
    elif given["installs"]:
        _install(given["installs"])
    elif given["clean"]:
        _clean()
    else:
        _run(given)


def _delays(text: str) -> tuple[float, ...]:
    """Raises:  click.BadParameter: not numbers, or out of range."""
    try:
        delays = tuple(float(delay) for delay in text.split(","))
    except ValueError:
        delays = ()
    if not delays or not all(0 <= delay <= _DELAY_MS_MAX for delay in delays):
        raise click.BadParameter(
            f"{text!r}: milliseconds from 0 to {_DELAY_MS_MAX:,}, separated by commas: 0,20,50"
        )
    return delays


def _run(given: dict[str, Any]) -> None:
    from dataplane_bench.report import compare, page, results, table
    from dataplane_bench.run import Options, run

    if sum(map(bool, (given["as_json"], given["markdown"], given["compare"]))) > 1:
        raise click.UsageError("--json, --markdown and --compare each write to stdout: choose one")
    old = results.read(given["compare"]) if given["compare"] else None
    if given["shown"]:
        report = results.read(given["shown"])
    else:
        named = tuple(name for name in given["peers"].split(",") if name and name != "none")
        try:
            limit = units.BYTES.parse(given["byte_limit"])
        except ValueError:
            text = f"--limit {given['byte_limit']}: {units.BYTES.allowed}"
            raise click.UsageError(text) from None
        fields = {name: given[name] for name in Options.__slots__ if name in given}
        options = Options(**{**fields, "peers": named, "byte_limit": limit})
        # Clean up after SIGTERM too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with _bar() as bar:
            report = run(options, bench_folder(), shlex.join(["dataplane", *sys.argv[1:]]), bar)
        kept = bench_folder() / "reports" / f"{report.created.replace(':', '')}.json"
        kept.parent.mkdir(exist_ok=True)
        results.write(report, kept)
        output.stderr().print(f"kept as {kept}", soft_wrap=True, highlight=False)
    if given["html"]:
        page.write(report, given["html"])
        output.stderr().print(f"wrote {given['html']}", soft_wrap=True, highlight=False)
    if given["as_json"]:
        sys.stdout.write(results.to_json(report) + "\n")
    elif given["markdown"]:
        sys.stdout.write(table.markdown(report))
    else:
        table.show(report)
        if old is not None:
            compare.show(old, report)
    if report.options.get("interrupted"):
        raise click.Abort


def _list(*, as_json: bool) -> None:
    from dataplane_bench.environments import environment
    from dataplane_bench.peers.base import PEERS, adapter
    from dataplane_bench.scenarios import SCENARIOS, Scale

    installed = {name: environment(name).python is not None for name in PEERS}
    scenarios = {
        name: [case.label for case in scenario.cases(Scale("tokens", 4))]
        for name, scenario in SCENARIOS.items()
    }
    if as_json:
        output.write_json({"scenarios": scenarios, "peers": installed})
        return
    rows = [(name, SCENARIOS[name].question, ", ".join(cases)) for name, cases in scenarios.items()]
    output.write_table(("scenario", "question", "cases"), rows)
    output.stdout().print()
    states = {True: "installed", False: "--install-peer"}
    output.write_table(
        ("peer", "", "state"),
        [(name, adapter(name).title, states[installed[name]]) for name in PEERS],
    )


def _install(names: tuple[str, ...]) -> None:
    from dataplane_bench.environments import environment
    from dataplane_bench.peers.base import PEERS

    console = output.stderr()
    failed = []
    for name in PEERS if names == ("all",) else names:
        if name not in PEERS:
            raise ConfigError(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
        made = environment(name)
        try:
            with console.status(f"installing {name}") as status:
                made.install(status.update)
            installed = ", ".join(
                f"{package} {version}" for package, version in made.versions().items()
            )
            console.print(f"{name}: installed ({installed})", highlight=False, soft_wrap=True)
        except ConfigError as error:
            if len(names) == 1 and names != ("all",):
                raise
            failed.append(name)
            output.write_error(error)
    if failed:
        raise ConfigError(f"not installed: {', '.join(failed)}")


def _clean() -> None:
    for name in ("source", "prepared", "own"):
        shutil.rmtree(bench_folder() / name, ignore_errors=True)
    output.stderr().print(f"removed generated and converted samples below {bench_folder()}")
