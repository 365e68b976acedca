"""Frames of data connections: what is sent arrives, and nothing else is taken for a frame."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dataplane.model.records import BlockForm, Region
from dataplane.neighbours import wire
from dataplane.neighbours.connection import BodyBytes, InFlight, Limits
from dataplane.neighbours.wire import Answer, Outcome, WrongFrameError
from dataplane.rpc.fetches import Neighbour, Peer, ReadRange, ToFetcher
from dataplane.rpc.lending import NO_DATASET, LendingKeys, Request, ToLender

u64 = st.integers(0, 2**64 - 1)
lengths = st.integers(1, wire.LENGTH_MAX)
of_block = {"number": u64, "dataset": st.binary(min_size=16, max_size=16), "block": u64}
requests = st.builds(
    Request,
    **of_block,
    offset=st.integers(0, wire.LENGTH_MAX),
    length=lengths,
    form=st.sampled_from([BlockForm.RAW, BlockForm.DECODED]),
)
slabs = st.builds(
    Request,
    number=u64,
    dataset=st.just(NO_DATASET),
    block=st.just(0),
    offset=st.just(0),
    length=lengths,
    form=st.just(BlockForm.SLAB),
    slab=st.binary(min_size=1, max_size=200),
)
runs = st.builds(
    Request,
    **of_block,
    offset=st.just(0),
    length=st.integers(1, wire.RUN_BYTES_MAX),
    form=st.just(BlockForm.RAW),
    count=st.integers(2, wire.RUN_BLOCKS_MAX),
)
any_request = st.one_of(requests, slabs, runs)
answers = st.builds(
    Answer,
    number=u64,
    outcome=st.sampled_from(Outcome),
    length=u64,
    crc32c=st.integers(0, 2**32 - 1),
    note=st.binary(max_size=9),
    ends=st.lists(u64, max_size=4).map(tuple),
)
names = st.text(min_size=1, max_size=256)
openings = st.builds(
    wire.Opening,
    job_id=names,
    generation=u64,
    asker_id=names,
    lender_id=names,
    nonce=st.binary(min_size=32, max_size=32),
)
keys = st.binary(min_size=32, max_size=32)


@given(any_request, st.integers(0, 2**32 - 1), st.data())
def test_requests_answers_and_receipts_arrive(
    request: Request, crc32c: int, data: st.DataObject
) -> None:
    frame = wire.pack(request)
    assert wire.frame_bytes(frame, wire.SMALL_BYTES_MAX) == len(frame)
    assert wire.unpack_request(frame) == request
    is_slab, count = request.form is BlockForm.SLAB, request.count
    ends = () if is_slab else tuple(range(count))
    is_part = is_slab or any(ends)
    length = data.draw(st.integers(0, request.length)) if is_part else request.length
    note = b"a note" if is_slab else b""
    given = Answer(request.number, Outcome.GIVEN, length, crc32c, note, ends)
    for answer in (given, Answer(request.number, Outcome.REFUSED)):
        assert wire.unpack_answer(wire.pack(answer), request) == answer
    wire.check_receipt(wire.pack(wire.Receipt(request.number)), request.number)


BLOCK, SLAB = Request(1, bytes(16), 0, 0, 9, BlockForm.RAW), BlockForm.SLAB
WRONG = {
    "no bytes": replace(BLOCK, length=0),
    "too many bytes": replace(BLOCK, length=wire.LENGTH_MAX + 1),
    "too far": replace(BLOCK, offset=wire.LENGTH_MAX + 1),
    "a short digest": replace(BLOCK, dataset=bytes(15)),
    "no blocks": replace(BLOCK, count=0),
    "too many blocks": replace(BLOCK, count=wire.RUN_BLOCKS_MAX + 1),
    "a run that is too long": replace(BLOCK, count=2, length=wire.RUN_BYTES_MAX + 1),
    "a run with an offset": replace(BLOCK, count=2, offset=1),
    "a run of decoded blocks": replace(BLOCK, count=2, form=BlockForm.DECODED),
    "a block with a body": replace(BLOCK, slab=b"x"),
    "a slab without a body": replace(BLOCK, form=SLAB),
    "a slab with a body that is too long": replace(
        BLOCK, form=SLAB, slab=bytes(wire.BODY_BYTES_MAX + 1)
    ),
    "a slab of a dataset": replace(BLOCK, form=SLAB, slab=b"x", dataset=b"x" * 16),
    "slabs": replace(BLOCK, form=SLAB, slab=b"x", count=2),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_request_that_breaks_the_rules_is_refused(name: str) -> None:
    with pytest.raises(WrongFrameError, match="a request for"):
        wire.unpack_request(wire.pack(WRONG[name]))


@given(any_request, answers)
def test_an_answer_that_does_not_fit_the_request_is_refused(
    request: Request, answer: Answer
) -> None:
    outcome, length, is_slab = answer.outcome, answer.length, request.form is BlockForm.SLAB
    with contextlib.suppress(WrongFrameError):
        assert wire.unpack_answer(wire.pack(answer), request).number == request.number
        is_given = outcome is Outcome.GIVEN
        assert not is_given or length <= request.length
        assert not is_given or length == request.length or is_slab or any(answer.ends)
        assert len(answer.ends) == (request.count if is_given and not is_slab else 0)
        assert not answer.note or (is_given and is_slab)
        assert is_given or not length


@given(st.data())
def test_a_changed_frame_is_refused_or_another_valid_one(data: st.DataObject) -> None:
    request = data.draw(any_request)
    answer = Answer(request.number, Outcome.GIVEN, request.length, 1)
    opening = data.draw(openings)
    challenge = wire.pack_challenge(bytes(32), b"an opening", bytes(32))
    frames = [
        (wire.pack(request), wire.unpack_request),
        (wire.pack(answer), lambda frame: wire.unpack_answer(frame, request)),
        (wire.pack(wire.Receipt(request.number)), lambda f: wire.check_receipt(f, request.number)),
        (wire.pack(opening), wire.unpack_opening),
        (challenge, lambda f: wire.answer_challenge(bytes(32), b"an opening", f)),
    ]
    frame, unpack = data.draw(st.sampled_from(frames))
    changed = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(changed[: data.draw(st.integers(0, len(changed)))])
    for received in (bytes(changed), cut):
        with contextlib.suppress(WrongFrameError):
            assert wire.frame_bytes(received, 9000) <= 9000 + wire.HEAD_BYTES
            unpack(received)


def test_a_frame_is_no_longer_than_what_is_expected() -> None:
    frame = wire.pack(wire.Opening("j" * 4000, 1, "a", "l", bytes(32)))
    assert wire.frame_bytes(frame[: wire.HEAD_BYTES - 1], wire.SMALL_BYTES_MAX) == 0
    assert wire.frame_bytes(frame[: wire.HEAD_BYTES], wire.SMALL_BYTES_MAX) == len(frame)
    with pytest.raises(WrongFrameError, match="not 4000 at most"):
        wire.frame_bytes(frame, 4000)
    with pytest.raises(WrongFrameError, match="where a frame begins"):
        wire.frame_bytes(b"DPn2" + frame[4:], wire.SMALL_BYTES_MAX)


@given(openings, keys, keys, st.binary(min_size=32, max_size=32))
def test_both_sides_need_the_same_key(
    opening: wire.Opening, key: bytes, other: bytes, nonce: bytes
) -> None:
    frame = wire.pack(opening)
    assert wire.unpack_opening(frame) == opening
    challenge = wire.pack_challenge(key, frame, nonce)
    proof = wire.answer_challenge(key, frame, challenge)
    wire.check_proof(key, frame, nonce, proof)
    if key != other:
        with pytest.raises(WrongFrameError, match="key"):
            wire.answer_challenge(other, frame, challenge)
        with pytest.raises(WrongFrameError, match="key"):
            wire.check_proof(other, frame, nonce, proof)
    # What one side has shown proves nothing for the other, or for another connection.
    reflected = wire.pack(wire.Proof(wire.unpack(wire.Challenge, challenge).proof))
    with pytest.raises(WrongFrameError, match="key"):
        wire.check_proof(key, frame, nonce, reflected)
    with pytest.raises(WrongFrameError, match="key"):
        wire.check_proof(key, frame, bytes(x ^ 1 for x in nonce), proof)


def test_a_key_shows_in_no_value() -> None:
    key = bytes(range(32))
    neighbour = Neighbour(Peer("host:1", "job", 1, key, "a", "b"), bytes(16), 0)
    read = ReadRange(1, "s3://b/k", 0, "", 0, Region(0, 1), neighbour=neighbour)
    for value in (read, ToFetcher(read), ToLender(LendingKeys("job", 1, key))):
        assert repr(key) not in f"{value!r} {value}"
        assert key.hex() not in f"{value!r} {value}"


# -- Whose turn it is to be lent something


ARENA = 3200  # 400 in flight, of which 100 for one neighbour


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef"), st.integers(1, 500))))
def test_the_bounds_hold_and_everything_begins_in_order(
    steps: list[tuple[bool, str, int]],
) -> None:
    in_flight: InFlight[tuple[str, int, int]] = InFlight(ARENA)
    begun: list[tuple[str, int, int]] = []
    waiting: dict[str, list[tuple[str, int, int]]] = {}

    def begin() -> None:
        while (request := in_flight.next()) is not None:
            assert waiting[request[0]].pop(0) == request
            begun.append(request)
            used = Counter(dict.fromkeys("abcdef", 0))
            for node, length, _ in begun:
                used[node] += length
            mine = [each for each in begun if each[0] == request[0]]
            assert used.total() <= ARENA // 8 or len(begun) == 1
            assert used[request[0]] <= ARENA // 32 or len(mine) == 1

    for number, (is_asked, node, length) in enumerate(steps):
        if is_asked:
            waiting.setdefault(node, []).append((node, length, number))
            in_flight.ask(node, length, (node, length, number))
        elif begun:
            over = begun.pop(length % len(begun))
            in_flight.ended(over[0], over[1])
        begin()
    while begun:
        over = begun.pop(0)
        in_flight.ended(over[0], over[1])
        begin()
    assert not any(waiting.values())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 150))))
def test_bodies_count_until_they_are_read(steps: list[tuple[str, int]]) -> None:
    bodies = BodyBytes(Limits(body_bytes=300, body_bytes_of_neighbour=120))
    held: list[tuple[str, int]] = []
    for node, length in steps:
        used = sum(bytes_ for _, bytes_ in held)
        of_node = sum(bytes_ for name, bytes_ in held if name == node)
        fits = used + length <= 300 and of_node + length <= 120
        assert bodies.reserve(node, length) == fits
        if fits:
            held.append((node, length))
        elif held:
            bodies.release(*held.pop(0))
    for each in held:
        bodies.release(*each)
    assert bodies.reserve("a", 120)


def test_one_neighbour_that_asks_for_much_does_not_delay_the_others() -> None:
    in_flight: InFlight[str] = InFlight(ARENA)
    for number in range(20):
        in_flight.ask("greedy", 60, f"greedy {number}")
    in_flight.ask("modest", 60, "modest")
    assert in_flight.next() == "greedy 0"
    assert in_flight.next() == "modest"
    assert in_flight.next() is None
    in_flight.ended("greedy", 60)
    assert in_flight.next() == "greedy 1"
