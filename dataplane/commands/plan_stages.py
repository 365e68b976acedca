"""`dataplane plan` of a run: the stages behind and ahead, by its ledger or by a saved state."""

from __future__ import annotations

import importlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dataplane.client.state import RunState
from dataplane.commands import output
from dataplane.commands.options import Settings
from dataplane.commands.traced import Traced, of_ledger
from dataplane.model.config import MixtureSpec
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import Ledger, Schedule

_STATE_BYTES_MAX = 1 << 28
_DEPTH_MAX = 4
_KEY = "spec_digest"


def show_state(path: str, *, as_json: bool) -> bool:
    """Show the stages of the run whose state is in a file of JSON or of torch.save(). Return False
    if it is another file.

    Raises:  ConfigError: the state is damaged, or torch is needed and cannot read it.
    """
    saved = next(_states_in(_content(path)), None)
    if saved is None:
        return False
    state, stages, first = RunState.from_dict(saved), list[dict[str, Any]](), 0
    before: dict[str, object] | None = None
    for number, stage in enumerate((*state.stages, None), 1):
        at = state if stage is None else stage
        now: dict[str, object] = {"global_batch": at.global_batch}
        now |= state.options if stage is None else stage.spec.facts() if stage.spec else {}
        last = at.epoch if at.cursor or stage is None else at.epoch - 1
        batch = at.global_batch
        stages.append({
            "stage": number,
            "first_epoch": first,
            "last_epoch": last if last >= first else None,
            "last_step": -(-at.cursor // batch) if batch and at.cursor else None,
            "unread": number > 1 and state.stages[number - 2].unread,
            "changed": _changed(before, now),
        })  # fmt: skip
        before, first = now, first if stage is None else stage.next_epoch
    ahead = _ahead(len(stages), state.schedule)
    if state.ahead is not None:
        ahead.insert(0, {"stage": len(stages) + 1, "begins": "after this epoch", "options": ""})
    place = {"epoch": state.epoch, "cursor": state.cursor, "sample_count": state.sample_count}
    if as_json:
        output.write_json({"stages": stages, "stages_ahead": ahead, **place})
        return True
    lines = [
        (
            f"{of['stage']}", _span(of), "" if of["last_step"] is None else f"{of['last_step']:,}",
            _begins_with(of), ", ".join(of["changed"]),
        )
        for of in stages
    ]  # fmt: skip
    columns = ("stage", "epochs", "steps of the last", "begins with", "changed options")
    said = f"cursor {state.cursor:,} of {state.sample_count:,} in epoch {state.epoch}"
    output.write_table(columns, lines, f"stages; the last one is at {said}")
    _show_ahead(ahead)
    return True


def _content(path: str) -> object:
    """Return what a file of JSON or of torch.save() contains; None for another file."""
    file = Path(path)
    if not file.is_file():
        return None
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if not any(name.endswith("/data.pkl") for name in archive.namelist()):
                return None
        return _saved_by_torch(path)
    with file.open("rb") as opened:
        if opened.read(1) != b"{" or file.stat().st_size > _STATE_BYTES_MAX:
            return None
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None  # such as JSON lines


def _saved_by_torch(path: str) -> object:
    try:
        torch = importlib.import_module("torch")  # the command line works without it
    except ImportError:
        raise ConfigError(
            f"{path} was written by torch.save(), and there is no torch here: run this where torch"
            " is installed, or save loader.state_dict() as JSON",
            path=path,
        ) from None
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many kinds
        raise ConfigError(
            f"{path} cannot be read with torch.load(weights_only=True): save loader.state_dict()"
            f" in a file of its own ({error!s:.200})",
            path=path,
        ) from error


def _states_in(content: object, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield the states of loaders in a checkpoint, which may have them below other names."""
    if isinstance(content, Mapping):
        if _KEY in content:
            yield content
        elif depth < _DEPTH_MAX:
            for part in content.values():
                yield from _states_in(part, depth + 1)


def show_ledger(
    settings: Settings, path: str, asked: Mapping[str, int | None], workers: int, *, as_json: bool
) -> None:
    """Show the stages of the run with the ledger at `path`."""
    options = {
        "data": (), "dataset_moved": False, "dp_size": None, "workers": workers,
        "format_name": "", "global_batch": asked["global_batch"],
    }  # fmt: skip
    ledger = Ledger.from_lines(Path(path).read_text(), path)
    _show_stages(of_ledger(settings, options, ledger), ledger.schedule, as_json=as_json)


def _show_stages(job: Traced, schedule: Schedule | None, *, as_json: bool) -> None:
    """Show the stages of a run, and the changes of the weights of a mixture that are ahead."""
    spec, first_step, stages = job.spec, 0, list[dict[str, Any]]()
    facts: list[dict[str, Any] | None] = [
        None if stage.spec is None else {**stage.spec.facts(), "global_batch": stage.global_batch}
        for stage in spec.stages
    ]
    facts.append({**spec.facts(), "global_batch": spec.global_batch})
    reached = job.reached or (0, 0)
    begins = [0, *(stage.next_epoch for stage in spec.stages)]
    for number, (begin, own) in enumerate(zip(begins, facts, strict=True)):
        is_former = number < len(spec.stages)
        stop = begins[number + 1] if is_former else max(reached[0] + (reached[1] > 0), begin + 1)
        steps = sum(map(job.steps_made, range(begin, stop)))
        stages.append({
            "stage": number + 1,
            "first_epoch": begin,
            "last_epoch": stop - 1 if stop > begin else None,
            "first_global_step": first_step,
            "steps": steps,
            "unread": bool(number) and spec.stages[number - 1].unread,
            "changed": _changed(facts[number - 1] if number else own, own),
        })  # fmt: skip
        first_step += steps
    weights = [] if spec.mixture is None else _weights_ahead(job, spec.mixture)
    ahead = _ahead(len(stages), schedule)
    if as_json:
        output.write_json(
            {"stages": stages, "stages_ahead": ahead, "ahead": weights, "reached": reached}
        )
        return
    lines = [
        (
            f"{of['stage']}", _span(of), f"{of['steps']:,}",
            f"{of['first_global_step']:,}", _begins_with(of), ", ".join(of["changed"]),
        )
        for of in stages
    ]  # fmt: skip
    columns = ("stage", "epochs", "steps", "first global step", "begins with", "changed options")
    output.write_table(columns, lines, "stages; the last one goes on")
    _show_ahead(ahead)
    if weights:
        shown = [(f"{at['epoch']}", f"{at['step']:,}", str(at["weights"])) for at in weights]
        output.write_table(("epoch", "step", "shares"), shown, "weights ahead")


def _changed(before: Mapping[str, object] | None, now: Mapping[str, object] | None) -> list[str]:
    old, new = before or {}, now or {}
    names = {*old, *new} if before is not None else set()
    return sorted(name for name in names if old.get(name) != new.get(name))


def _span(of: Mapping[str, Any]) -> str:
    return "none" if of["last_epoch"] is None else f"{of['first_epoch']} to {of['last_epoch']}"


def _begins_with(of: Mapping[str, Any]) -> str:
    return "what was unread" if of["unread"] else "all data"


def _ahead(number: int, schedule: Schedule | None) -> list[dict[str, Any]]:
    """Return the stages of a schedule after the present one, which has this number."""
    if schedule is None:
        return []
    ahead, made, (now, *stages) = list[dict[str, Any]](), schedule.made, schedule.stages
    for stage in stages:
        steps = output.counted(now.steps - made, "more step" if made else "step")
        begins = f"after {steps if now.steps else output.counted(now.epochs, 'epoch')}"
        number, made, now = number + 1, 0, stage
        about = {"begins": begins, "change": stage.change, "options": stage.options}
        ahead.append({"stage": number, **about})
    return ahead


def _show_ahead(ahead: list[dict[str, Any]]) -> None:
    if ahead:
        lines = [
            (f"{at['stage']}", at["begins"], at.get("change", ""), at["options"]) for at in ahead
        ]
        output.write_table(("stage", "begins", "change", "options"), lines, "stages ahead")


def _weights_ahead(job: Traced, mixture: MixtureSpec) -> list[dict[str, Any]]:
    """Return the changes of weights after the place that the run has reached."""
    return [
        {
            "epoch": change.epoch,
            "step": -(-change.position // job.spec.global_batch),
            "weights": {
                source.name: round(share / sum(change.shares), 6)
                for source, share in zip(mixture.sources, change.shares, strict=True)
            },
        }
        for change in mixture.changes
        if change.place > (job.reached or (0, 0))
    ]
