"""A ledger as JSON lines: what is written comes back, and what was changed is found."""

from __future__ import annotations

import hashlib
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dataplane.cli import run
from dataplane.model.config import JobSpec
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
from dataplane.model.records import ColumnOptions, DatasetIdentity, End

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
