"""Where two runs part, from their ledgers, against a plain model of what they read."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec import structs

from dataplane.cli import run
from dataplane.model.changes import Skip, Tombstone, skip_payload, tombstone_payload
from dataplane.model.config import JobSpec, MixtureSpec, SourceSpec
from dataplane.model.ledger import Ledger, LedgerEntry, LedgerPosition, canonical
from dataplane.model.ledger_diff import ledger_differences
from dataplane.model.records import ColumnOptions, DatasetIdentity, MixHistory, ShareChange

SAMPLES, EPOCHS = 24, 2
SPEC = JobSpec("f", 1, True, 2, 4, 4)
SET = DatasetIdentity("c", "l")


def ledger_of(events, spec=SPEC, dataset=SET, **more) -> Ledger:
    """`events` are starts (epoch, cursor, batch), skips and tombstones, in the order of time."""
    entries, previous, last_change = [], "", 0
    for seq, event in enumerate(events, 1):
        at, payload = LedgerPosition(0, 0), ""
        match event:
            case Skip(epoch, begin, _):
                kind, at = "skip", LedgerPosition(epoch, begin)
                payload, last_change = skip_payload(event, spec, dataset), seq
            case Tombstone():
                kind, last_change = "tombstone", seq
                payload = tombstone_payload([event], spec, dataset)
            case (epoch, cursor, batch):
                kind, at = "start", LedgerPosition(epoch, cursor)
                payload = canonical({"global_batch": batch, "last_change": last_change})
        entries.append(LedgerEntry(seq, kind, at, payload, "me", 0.0, previous))
        previous = entries[-1].hash
    return Ledger("job", (), spec, SAMPLES, 1, dataset=dataset, entries=tuple(entries), **more)


def read(events) -> dict[tuple[int, int], tuple[object, ...]]:
    """For each position of each epoch, as it was read last: the first position of its step, its
    batch, and the rows that were taken out; "skipped" if it was not read.
    """
    found = {}
    skips, rows = [], ()
    launched = False
    first = next((event for event in events if isinstance(event, tuple)), (0, 0, 4))
    for event in ((0, 0, first[2]), *events):
        if isinstance(event, Skip):
            skips.append(event)
        elif isinstance(event, Tombstone):
            rows = tuple(sorted({*rows, event}))
        else:
            epoch, cursor, batch = event
            for e in range(epoch, EPOCHS):
                start = cursor if e == epoch else 0
                for position in range(start, SAMPLES):
                    gone = any(s.epoch == e and s.begin <= position < s.end for s in skips)
                    begin = position - (position - start) % batch
                    found[e, position] = ("skipped",) if gone else (begin, batch, rows)
            launched = True
    assert launched
    return found


batches = st.sampled_from([2, 4, 6])
starts = st.tuples(
    st.integers(0, EPOCHS - 1), st.integers(0, SAMPLES // 2 - 1).map(lambda n: 2 * n), batches
)
skips = st.builds(
    lambda epoch, begin, count: Skip(epoch, 2 * begin, 2 * begin + 2 * count),
    st.integers(0, EPOCHS - 1), st.integers(0, 6), st.integers(1, 4),
)  # fmt: skip
rows = st.builds(Tombstone, st.integers(0, 1), st.integers(0, 3))
histories = st.lists(starts | skips | rows, max_size=5).map(
    lambda events: (
        [(0, 0, 4), *events] if not events or not isinstance(events[0], tuple) else events
    )
)


@given(histories, histories)
def test_runs_part_where_a_plain_model_of_them_does(first, second):
    """Skips make steps longer or shorter behind them, so steps are compared by their launches."""
    models = read(first), read(second)
    expected = min((at for at in models[0] if models[0][at] != models[1][at]), default=None)
    found = ledger_differences(ledger_of(first), ledger_of(second))
    places = [(one.epoch, one.position) for one in found if one.position < SAMPLES]
    assert min(places, default=None) == expected
    assert ledger_differences(ledger_of(first), ledger_of(first)) == ()


def test_options_and_datasets_differ_from_the_first_step_on_and_forms_do_not():
    first = ledger_of([])
    for change, names in (
        ({"seed": 2}, ["seed"]),
        ({"window": 8, "lanes": 3}, ["lanes", "window"]),
        ({"column_options": ColumnOptions(columns=("a",))}, []),
        ({"fingerprint": "g"}, []),
    ):
        found = ledger_differences(first, ledger_of([], structs.replace(SPEC, **change)))
        assert sorted(one.what for one in found) == names
        assert all((one.epoch, one.step) == (0, 0) for one in found)
    (found,) = ledger_differences(first, ledger_of([], dataset=DatasetIdentity("c", "m")))
    assert (found.what, found.first, found.second) == ("dataset", "l", "m")


def mixed(*changes: ShareChange) -> JobSpec:
    sources = (SourceSpec("web", "f", 3), SourceSpec("code", "g", 1))
    history = MixHistory((ShareChange(0, 0, (3, 1)), *changes))
    return structs.replace(SPEC, mixture=MixtureSpec(sources).with_history(history))


def test_weights_differ_from_the_first_change_on_that_only_one_run_has():
    shared, own = ShareChange(0, 8, (1, 1)), ShareChange(1, 4, (1, 3))
    (found,) = ledger_differences(ledger_of([], mixed(shared)), ledger_of([], mixed(shared, own)))
    assert (found.what, found.epoch, found.position, found.step) == ("weights", 1, 4, 1)
    assert (found.first, found.second) == ("web 0.5, code 0.5", "web 0.25, code 0.75")


def test_lengths_in_tokens_and_in_samples_differ():
    in_samples = structs.replace(mixed(), mixture=structs.replace(mixed().mixture, length=40))
    in_tokens = structs.replace(in_samples.mixture, tokens=400)
    both = ledger_of([], in_samples), ledger_of([], structs.replace(in_samples, mixture=in_tokens))
    for first, second, shown in ((*both, ("0", "400")), (*both[::-1], ("400", "0"))):
        (found,) = ledger_differences(first, second)
        assert (found.what, (found.first, found.second)) == ("mixture.tokens", shown)


def test_the_command_names_the_first_step_and_what_made_it_differ(tmp_path, capsys):
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    runs = [(0, 0, 4), (1, 8, 4)], [(0, 0, 4), Skip(1, 8, 16), (1, 4, 4), (1, 20, 2)]
    for path, events in zip(paths, runs, strict=True):
        ledger = ledger_of(events, epoch=1, cursor=12)
        Path(path).write_text(ledger.to_lines())
    assert run(["ledger", "diff", *paths, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["equal"]
    assert [(one["what"], one["epoch"], one["step"]) for one in told["differences"]] == [
        ("skip", 1, 2),
        ("global_batch", 1, 5),
    ]
    assert run(["ledger", "diff", *paths]) == 1
    shown = capsys.readouterr().out
    assert "epoch 1, step 2" in shown
    assert "positions 8:16" in shown
    assert run(["ledger", "diff", paths[0], paths[0]]) == 0
    assert "no difference" in capsys.readouterr().out
    Path(paths[1]).write_text('{"ledger": 1}')
    assert run(["ledger", "diff", *paths]) == 2
    assert "b.jsonl is not a ledger, or damaged" in capsys.readouterr().err


@pytest.mark.parametrize("payload", ["[]", '{"global_batch": 4, "last_change": "x"}'])
def test_a_damaged_entry_is_refused(payload):
    entry = LedgerEntry(1, "start", LedgerPosition(0, 0), payload, "me", 0.0)
    damaged = structs.replace(ledger_of([]), entries=(entry,))
    with pytest.raises(Exception, match="damaged") as caught:
        ledger_differences(damaged, ledger_of([]))
    assert type(caught.value).__name__ == "ConfigError"
