"""`dataplane plan` for a mixture: the share of each of several datasets in an epoch.

A node started here opens the mixture as it would for a loader, so weights, columns and views are
checked, counted and refused in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs
from msgspec.structs import replace

from dataplane.commands import output
from dataplane.commands.options import PacksAsked, Settings
from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError, DatasetChangedError
from dataplane.model.records import End, Topology, View
from dataplane.settings import node_config

if TYPE_CHECKING:
    from dataplane.plan.explain import MixtureExplanation, SourcePlan
    from dataplane.plan.manifest import Manifest
    from dataplane.plan.shuffled import HostFigures
    from dataplane.rpc.messages import JobOpened
    from dataplane.transforms.mixture_options import Mixture


_DIGITS_MAX = 15


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """The job whose epoch is explained. None for `lanes` or `window` is the dataset's default."""

    dp_size: int
    ranks_per_host: int
    global_batch: int
    seed: int
    epoch: int
    shuffle: bool
    lanes: int | None
    window: int | None
    end: End

    def asked_of(self, spec: JobSpec) -> JobSpec:
        """Return a spec with the order that is asked about, in the form that a loader sends."""
        return replace(
            spec,
            seed=self.seed,
            shuffle=self.shuffle,
            lanes=self.lanes or 0,
            window=self.window or 0,
            global_batch=self.global_batch,
            end=self.end,
        )


def mixture_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--source` for each dataset of a mixture, and the arguments of Mixture. The command is
    called with `mixture`, None without these options.
    """

    @functools.wraps(command)
    def chosen(*, sources: tuple[str, ...], urls: tuple[str, ...], **given: Any) -> Any:
        names = ("unit", "exhausted", "length", "temperature", "columns", "schedule")
        options = {name: given.pop(name) for name in names}
        given_options = {name: value for name, value in options.items() if value not in (None, ())}
        if bool(urls) == bool(sources) or (urls and given_options):
            what = "give the urls of one dataset, or --source NAME=URL,weight=… for each of several"
            raise ConfigError(what, field="source")
        mixture = _asked(sources, given_options) if sources else None
        return command(urls=urls, mixture=mixture, **given)

    made: Callable[..., Any] = chosen
    for flag, metavar, kind, text in (
        ("--columns", "A,B,…", str, "With --source: only these columns, which all sources have."),
        (
            "--temperature",
            "T",
            float,
            "With --source: shares in proportion to n^(1/T), instead of weights.",
        ),
        ("--length", "COUNT", str, 'With --source: the length of an epoch, or "10B tokens".'),
        ("--exhausted", "POLICY", str, "With --source: stop (default), renormalise or cycle."),
        ("--unit", "UNIT", str, "With --source: weights of samples (default), tokens or batch."),
    ):
        made = click.option(flag, metavar=metavar, type=kind, help=text)(made)
    made = click.option(
        "--schedule",
        metavar="STEP:NAME=WEIGHT,…",
        multiple=True,
        help="With --source: other weights from this step of the job on.",
    )(made)
    return click.option(
        "--source",
        "sources",
        metavar="NAME=URL,weight=W,…",
        multiple=True,
        help="One dataset of a mixture, with the arguments of Source.",
    )(made)


@dataclasses.dataclass(frozen=True, slots=True)
class AskedMixture:
    """A mixture, and the columns of its batches (all if none are given)."""

    mixture: Mixture
    columns: tuple[str, ...]


def _asked(sources: tuple[str, ...], given: Mapping[str, Any]) -> AskedMixture:
    """Parse the options of a mixture.

    Raises:  ConfigError: a source or the weights are invalid.
    """
    from dataplane.transforms.mixture_options import Mixture, source_of_text

    named = [source_of_text(text) for text in sources]
    if len(dict(named)) < len(named):
        names = [name for name, _ in named]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"two sources are called {twice!r}: give each another name", field="source"
        )
    columns = tuple(filter(None, str(given.get("columns", "")).split(",")))
    options = {name: value for name, value in given.items() if name != "columns"}
    schedule = [_scheduled(text) for text in options.pop("schedule", ())]
    if str(options.get("length", "")).isdecimal():
        options["length"] = int(options["length"])
    return AskedMixture(Mixture(dict(named), schedule=schedule, **options), columns)


def _scheduled(text: str) -> tuple[int, dict[str, float]]:
    """Parse a step and its weights.

    Raises:  ConfigError: the text has another form.
    """
    from dataplane.commands.ledger import weights_in

    step, _, weights = text.partition(":")
    if not step.isdecimal() or len(step) > _DIGITS_MAX:
        raise ConfigError(
            f"schedule {text!r:.200}: write STEP:NAME=WEIGHT,…, such as 1000:web=0.6,code=0.4",
            field="schedule",
        )
    return int(step), weights_in(weights.split(","))


def show_mixture(
    mixture: AskedMixture,
    settings: Settings,
    view: View,
    question: Question,
    *,
    packs: PacksAsked | None,
    format_name: str,
    workers: int,
    as_json: bool,
) -> None:
    """Open the mixture as a job, and print the plan of an epoch of it.

    Raises:  ConfigError, or another error of a job, as a loader would.
    """
    from dataplane.plan.cluster import Cluster
    from dataplane.plan.explain import explain_mixture

    if packs is not None:
        view = packs.view(view)
    job, manifests = _opened(mixture, settings, view, question, format_name, workers)
    cluster = Cluster(question.dp_size, question.ranks_per_host)
    epoch = question.epoch
    explanation = explain_mixture(job.spec, manifests, cluster, epoch)
    explanation = dataclasses.replace(explanation, warnings=(*job.advice, *explanation.warnings))
    if as_json:
        output.write_json(dataclasses.asdict(explanation))
        return
    output.write_table(("", "", ""), _lines(explanation))
    output.stdout().print()
    for change in explanation.changes:
        shares = zip(explanation.sources, change.shares, strict=True)
        said = ", ".join(f"{source.name} {share:.2%}" for source, share in shares)
        text = f"from step {change.step:,} on, at sample {change.position:,}: {said}"
        output.stdout().print(text, markup=False, soft_wrap=True)
    headings = (
        *("source", "asked", "got", "samples", "passes", "exhausted", "of the epoch"),
        *("window", "open windows"),
    )
    rows = [_row(source, explanation.sample_count) for source in explanation.sources]
    output.write_table(headings, rows, f"what epoch {epoch} has of each source")
    show_host_counts(explanation.by_host_count)
    for warning in explanation.warnings:
        output.warn(warning)


def show_host_counts(figures: Sequence[HostFigures]) -> None:
    """Print the costs of each host, for 1 to 1,024 hosts."""
    size = output.approximate_bytes
    output.stdout().print()
    headings = (
        *("hosts", "ranks", "lanes a rank", "open windows, about"),
        *("reads, about", "times its share"),
    )
    rows = [
        (
            f"{figure.host_count:,}",
            f"{figure.dp_size:,}",
            f"{figure.lanes_per_rank:,}",
            size(figure.open_window_bytes_per_host),
            size(figure.bytes_read_per_host),
            f"{figure.reads_times_share:.2f}",
        )
        for figure in figures
    ]
    output.write_table(headings, rows, "what each host takes, for so many hosts")


def _opened(
    mixture: AskedMixture,
    settings: Settings,
    view: View,
    question: Question,
    format_name: str,
    workers: int,
) -> tuple[JobOpened, list[Manifest]]:
    """Open the job at a node; return it with the manifests of its samples."""
    from dataplane.commands.datasets import opened
    from dataplane.commands.own_node import imported_map, own_session, packs_in, request_of
    from dataplane.plan.views import rows_only
    from dataplane.transforms.options import only

    config, whole, views = node_config(settings), [], {}
    for name, source in mixture.mixture.sources.items():
        views[name] = _view(view, source.own_options())
        if views[name].map:
            imported_map(views[name].map)  # fails early if the node could not import it
        form, rows = source.format or format_name, rows_only(views[name])
        whole.append(opened((str(source.urls),), form, workers, config, rows))
    config = structs.replace(config, allowed_functions=" ".join(own.map for own in views.values()))
    urls = {name: manifest.urls for name, manifest in zip(views, whole, strict=True)}
    columns = mixture.columns if view.pack is None else (view.pack.column,)
    spec = question.asked_of(JobSpec("", column_options=only(columns), view=view))
    size, local = question.dp_size, min(question.ranks_per_host, question.dp_size)
    topology = Topology(dp_size=size, world_size=size, local_world_size=local)
    every = tuple(url for of_source in urls.values() for url in of_source)
    request = request_of(every, format_name, spec, topology)
    session = own_session(
        replace(request, mixture=mixture.mixture.asked(urls, views, format_name)), settings
    )
    try:
        opened_job = session.job
    finally:
        session.close()
    spec = opened_job.spec
    assert spec.mixture is not None
    for mixed, manifest in zip(spec.mixture.sources, whole, strict=True):
        if view.pack is None and mixed.fingerprint != manifest.fingerprint:
            raise DatasetChangedError(
                f"the dataset of source {mixed.name!r} has changed since its manifest was made:"
                " index it again",
                shard=", ".join(manifest.urls),
                expected=manifest.fingerprint,
                found=mixed.fingerprint,
            )
    if view.pack is None:
        return opened_job, whole
    pairs = zip(whole, views.values(), strict=True)
    return opened_job, [packs_in(rows, of, spec.seed, config) for rows, of in pairs]


def _view(view: View, own: Mapping[str, Any]) -> View:
    """Return the view of a source: that of the command line, overridden by the source's own
    options.
    """
    from dataplane.transforms.functions import function_name
    from dataplane.transforms.options import view_of

    of_rows = {
        name: value for name, value in own.items() if name not in {"map", "resizes", "per_epoch"}
    }
    said, none = view_of(**of_rows), View()
    mine = {
        name: value for name, value in structs.asdict(said).items() if value != getattr(none, name)
    }
    if "split" in own:
        mine |= {"split_from": said.split_from, "split_to": said.split_to}
    if "map" in own:
        mine["map"] = function_name(own["map"], "map")
    return structs.replace(view, **mine)


def _lines(explanation: MixtureExplanation) -> list[tuple[str, str, str]]:
    size = output.approximate_bytes
    lines = [
        ("samples", f"{explanation.sample_count:,}", f"of {len(explanation.sources):,} sources"),
        ("steps", f"{explanation.step_count:,}", "the same on every rank"),
        ("dropped", f"{explanation.samples_dropped:,}", "samples after the last full batch"),
        ("padded", f"{explanation.samples_padded:,}", "samples that are repeated"),
        ("lanes", f"{explanation.lanes:,}", f"{explanation.lanes_per_rank:,} a rank"),
        ("a round", f"{explanation.round_samples:,}", "samples; other weights begin with one"),
        ("open windows", size(explanation.open_window_bytes_per_host), "of memory, per host"),
    ]
    return [line for line in lines if line[1] != "0"]


def _row(source: SourcePlan, sample_count: int) -> tuple[object, ...]:
    end = source.exhausted_position
    return (
        source.name,
        f"{source.asked_share:.2%}",
        f"{source.share:.2%}",
        f"{source.samples:,} of {source.available:,}",
        f"{source.passes:.2f}",
        None if end is None else f"step {source.exhausted_step:,}",
        None if end is None else f"{end / sample_count:.0%}",
        f"{source.window:,}",
        output.approximate_bytes(source.open_window_bytes_per_host),
    )
