"""A ledger as JSON lines: what is written comes back, and what was changed is found."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec import structs

from dataplane.cli import run
from dataplane.model.changes import Skip, skip_payload, tombstone_payload
from dataplane.model.config import JobSpec, MixtureSpec, SourceSpec
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import (
    MARK,
    Ledger,
    LedgerEntry,
    LedgerMark,
    LedgerPosition,
    canonical,
    text_faults,
)
from dataplane.model.ledger_diff import ledger_differences
from dataplane.model.records import (
    ColumnOptions,
    DatasetIdentity,
    End,
    MixHistory,
    ShareChange,
    Tombstone,
)

names = st.text(max_size=8)
counts = st.integers(0, 2**62 - 1)
payloads = st.dictionaries(names, counts | names | st.booleans(), max_size=3).map(canonical)
rows = st.tuples(names, counts, counts, payloads, names, st.floats(0, 1e10))
specs = st.builds(
    JobSpec, names, counts, st.booleans(), counts, end=st.sampled_from(End),
    column_options=st.builds(ColumnOptions, columns=st.lists(names, max_size=2).map(tuple)),
)  # fmt: skip
heads = st.builds(
    Ledger, names, st.lists(names, max_size=3).map(tuple), specs, counts, st.integers(1, 2**20), names, counts,
    counts, st.none() | st.builds(DatasetIdentity, names, names),
)  # fmt: skip


def chained(found) -> tuple[LedgerEntry, ...]:
    entries, previous = [], ""
    for seq, (kind, epoch, cursor, payload, by, at) in enumerate(found, 1):
        entry = LedgerEntry(seq, kind, LedgerPosition(epoch, cursor), payload, by, at, previous)
        entries.append(entry)
        previous = entry.hash
    return tuple(entries)


def ledger_of(head: Ledger, found) -> Ledger:
    fields = {name: getattr(head, name) for name in Ledger.__slots__}
    return Ledger(**{**fields, "entries": chained(found)})


@given(heads, st.lists(rows, max_size=4))
def test_what_is_written_comes_back_and_is_whole(head, found):
    ledger = ledger_of(head, found)
    text = ledger.to_lines()
    assert text.encode().startswith(MARK)
    assert Ledger.from_lines(text, "it") == ledger
    assert text_faults(text, ledger)[1] == []


@given(heads, st.lists(rows, min_size=2, max_size=4))
def test_the_hash_of_a_line_is_in_the_next_and_the_last_one_in_the_first(head, found):
    first, *lines = ledger_of(head, found).to_lines().rstrip("\n").split("\n")
    hashes = [hashlib.blake2b(line.encode(), digest_size=16).hexdigest() for line in lines]
    assert [json.loads(line)["previous"] for line in lines] == ["", *hashes[:-1]]
    assert json.loads(first)["head"] == hashes[-1]


@given(heads, st.lists(rows, min_size=1, max_size=4), st.data())
def test_any_change_of_an_entry_is_found(head, found, data):
    ledger = ledger_of(head, found)
    first, *lines = ledger.to_lines().rstrip("\n").split("\n")
    at = data.draw(st.integers(0, len(lines) - 1))
    how = data.draw(st.sampled_from(["change", "swap", "cut"]))
    if how == "change":
        lines[at] = canonical({**json.loads(lines[at]), "by": json.loads(lines[at])["by"] + "x"})
    elif how == "swap" and len(lines) > 1:
        lines[at - 1], lines[at] = lines[at], lines[at - 1]
    else:
        del lines[-1]
    text = "\n".join([first, *lines])
    assert text_faults(text, Ledger.from_lines(text, "it"))[1]


@given(heads, st.lists(rows, max_size=2), st.data())
def test_any_other_text_is_a_change(head, found, data):
    text = ledger_of(head, found).to_lines()
    about, _, entries = text.partition("\n")
    plain = json.loads(about)
    name = data.draw(st.sampled_from(sorted(plain.keys() - {"ledger", "head", "hash"})))
    other = json.loads(ledger_of(data.draw(heads), found).to_lines().partition("\n")[0])
    changed = json.dumps({**plain, name: other[name]}, separators=(",", ":"), ensure_ascii=False)
    without = {key: value for key, value in plain.items() if key != "hash"}
    for first in (changed, about.replace(":", ": ", 1), json.dumps(without)):
        again = f"{first}\n{entries}"
        if again != text:
            assert text_faults(again, Ledger.from_lines(again, "it"))[1]
    for again in (text + "\n", text[:-1], text.replace(",", ", "), "\n" + text):
        assert text_faults(again, Ledger.from_lines(again, "it"))[1]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("cursor", 2**70, "64 bits"),
        ("epoch", -1, r"0 to 2\*\*62"),
        ("dp_size", 0, "dp_size must be 1"),
        ("spec", {"seed": 2**64}, "64 bits"),
        ("job_id", "\ud800", "surrogates"),
    ],
)
def test_numbers_and_texts_that_no_ledger_has_are_refused(name, value, says):
    ledger = Ledger("j", ("file:///x",), JobSpec("f"), 10, 1)
    about = {**json.loads(ledger.to_lines()), name: value}
    with pytest.raises(ConfigError, match=f"it is not a ledger, or damaged: .*{says}"):
        Ledger.from_lines(json.dumps(about), "it")


@pytest.mark.parametrize("text", ["", "[]", '{"ledger":1}', "{", '{"ledger":1,"head":3}\nnothing'])
def test_what_is_no_ledger_is_refused_by_name(text):
    with pytest.raises(ConfigError, match=r"run\.jsonl is not a ledger, or damaged"):
        Ledger.from_lines(text, "run.jsonl")


@pytest.mark.parametrize(
    ("seq", "head", "known", "is_there"),
    [(3, "c", "abc", True), (3, "x", "abc", False), (3, "c", "ab", False), (1, "a", "", False),
     (2, "b", "__cd", True), (2, "x", "abc", False)],
)  # fmt: skip
def test_a_mark_is_found_in_the_ledger_that_has_it_or_may_have_left_it_out(
    seq, head, known, is_there
):
    marks = [LedgerMark(at, one) for at, one in enumerate(known, 1) if one != "_"]
    assert LedgerMark(seq, head).is_in(marks) == is_there


@pytest.mark.parametrize(
    ("payload", "at", "status", "said"),
    [
        ({"x": 1}, 2.0**70, 0, "1.18059162"),
        ({"x": 1}, -1e300, 0, "x=1"),
        ([1], 0.0, 2, "entry 1 of the ledger (start) is damaged"),
        (None, 0.0, 2, "entry 1 of the ledger (start) is damaged"),
    ],
)
def test_entries_that_somebody_has_changed_are_shown_or_named(
    tmp_path, capsys, payload, at, status, said
):
    entry = LedgerEntry(1, "start", LedgerPosition(0, 0), canonical(payload), "me", at)
    spec = JobSpec("f")
    ledger = Ledger("j", ("file:///x",), spec, 10, 1, dataset=None, entries=(entry,))
    (tmp_path / "l.jsonl").write_text(ledger.to_lines())
    assert run(["ledger", "show", str(tmp_path / "l.jsonl")]) == status
    assert said in "".join(capsys.readouterr())


def test_a_file_that_is_no_ledger_is_no_name_of_a_job(tmp_path, capsys):
    (tmp_path / "l.jsonl").write_text("")  # of an export that failed, for instance
    for command in ("show", "verify", "export"):
        assert run(["ledger", command, str(tmp_path / "l.jsonl")]) == 2
        assert "l.jsonl is not a ledger: " in capsys.readouterr().err


SAMPLES, EPOCHS = 24, 2
SPEC = JobSpec("f", 1, True, 2, 4, 4)
SET = DatasetIdentity("c", "l")


def part_ledger(events, spec=SPEC, dataset=SET, **more) -> Ledger:
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
    skips, part_rows = [], ()
    launched = False
    first = next((event for event in events if isinstance(event, tuple)), (0, 0, 4))
    for event in ((0, 0, first[2]), *events):
        if isinstance(event, Skip):
            skips.append(event)
        elif isinstance(event, Tombstone):
            part_rows = tuple(sorted({*part_rows, event}))
        else:
            epoch, cursor, batch = event
            for e in range(epoch, EPOCHS):
                start = cursor if e == epoch else 0
                for position in range(start, SAMPLES):
                    gone = any(s.epoch == e and s.begin <= position < s.end for s in skips)
                    begin = position - (position - start) % batch
                    found[e, position] = ("skipped",) if gone else (begin, batch, part_rows)
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
part_rows = st.builds(Tombstone, st.integers(0, 1), st.integers(0, 3))
histories = st.lists(starts | skips | part_rows, max_size=5).map(
    lambda events: (
        [(0, 0, 4), *events] if not events or not isinstance(events[0], tuple) else events
    )
)


@given(histories, histories)
def test_runs_part_where_a_plain_model_of_them_does(first, second):
    """Skips make steps longer or shorter behind them, so steps are compared by their launches."""
    models = read(first), read(second)
    expected = min((at for at in models[0] if models[0][at] != models[1][at]), default=None)
    found = ledger_differences(part_ledger(first), part_ledger(second))
    places = [(one.epoch, one.position) for one in found if one.position < SAMPLES]
    assert min(places, default=None) == expected
    assert ledger_differences(part_ledger(first), part_ledger(first)) == ()


def test_options_and_datasets_differ_from_the_first_step_on_and_forms_do_not():
    first = part_ledger([])
    for change, names in (
        ({"seed": 2}, ["seed"]),
        ({"window": 8, "lanes": 3}, ["lanes", "window"]),
        ({"column_options": ColumnOptions(columns=("a",))}, []),
        ({"fingerprint": "g"}, []),
    ):
        found = ledger_differences(first, part_ledger([], structs.replace(SPEC, **change)))
        assert sorted(one.what for one in found) == names
        assert all((one.epoch, one.step) == (0, 0) for one in found)
    (found,) = ledger_differences(first, part_ledger([], dataset=DatasetIdentity("c", "m")))
    assert (found.what, found.first, found.second) == ("dataset", "l", "m")


def mixed(*changes: ShareChange) -> JobSpec:
    sources = (SourceSpec("web", "f", 3), SourceSpec("code", "g", 1))
    history = MixHistory((ShareChange(0, 0, (3, 1)), *changes))
    return structs.replace(SPEC, mixture=MixtureSpec(sources).with_history(history))


def test_weights_differ_from_the_first_change_on_that_only_one_run_has():
    shared, own = ShareChange(0, 8, (1, 1)), ShareChange(1, 4, (1, 3))
    (found,) = ledger_differences(
        part_ledger([], mixed(shared)),
        part_ledger([], mixed(shared, own)),
    )
    assert (found.what, found.epoch, found.position, found.step) == ("weights", 1, 4, 1)
    assert (found.first, found.second) == ("web 0.5, code 0.5", "web 0.25, code 0.75")


def test_lengths_in_tokens_and_in_samples_differ():
    in_samples = structs.replace(mixed(), mixture=structs.replace(mixed().mixture, length=40))
    in_tokens = structs.replace(in_samples.mixture, tokens=400)
    both = (
        part_ledger([], in_samples),
        part_ledger([], structs.replace(in_samples, mixture=in_tokens)),
    )
    for first, second, shown in ((*both, ("0", "400")), (*both[::-1], ("400", "0"))):
        (found,) = ledger_differences(first, second)
        assert (found.what, (found.first, found.second)) == ("mixture.tokens", shown)


def test_the_command_names_the_first_step_and_what_made_it_differ(tmp_path, capsys):
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    runs = [(0, 0, 4), (1, 8, 4)], [(0, 0, 4), Skip(1, 8, 16), (1, 4, 4), (1, 20, 2)]
    for path, events in zip(paths, runs, strict=True):
        ledger = part_ledger(events, epoch=1, cursor=12)
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
    damaged = structs.replace(part_ledger([]), entries=(entry,))
    with pytest.raises(Exception, match="damaged") as caught:
        ledger_differences(damaged, part_ledger([]))
    assert type(caught.value).__name__ == "ConfigError"
