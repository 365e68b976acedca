"""Frames of data connections: what is sent arrives, and nothing else is taken for a frame."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.model.records import BlockForm, Region
from dataplane.neighbours import handshake, wire
from dataplane.neighbours.wire import Answer, Outcome, Request, WrongFrameError
from dataplane.rpc.fetches import Neighbour, ReadRange, ToFetcher
from dataplane.rpc.lending import LendingKeys, ToLender

u64 = st.integers(0, 2**64 - 1)
lengths = st.integers(1, wire.LENGTH_MAX)
requests = st.builds(
    Request,
    number=u64,
    dataset=st.binary(min_size=16, max_size=16),
    block=u64,
    offset=st.integers(0, wire.LENGTH_MAX),
    length=lengths,
    form=st.sampled_from([BlockForm.RAW, BlockForm.DECODED]),
)
slabs = st.builds(
    wire.slab_request,
    number=u64,
    room=lengths,
    body=st.binary(min_size=1, max_size=200),
)
runs = st.builds(
    Request,
    number=u64,
    dataset=st.binary(min_size=16, max_size=16),
    block=u64,
    offset=st.just(0),
    length=st.integers(1, wire.RUN_BYTES_MAX),
    form=st.just(BlockForm.RAW),
    count=st.integers(2, wire.RUN_BLOCKS_MAX),
)
names = st.text(min_size=1, max_size=256)
openings = st.builds(
    handshake.LineOpening,
    job_id=names,
    generation=u64,
    asker_id=names,
    lender_id=names,
    nonce=st.binary(min_size=32, max_size=32),
)
keys = st.binary(min_size=32, max_size=32)


@given(requests, st.integers(0, 2**32 - 1))
def test_requests_answers_and_receipts_arrive(request: Request, crc32c: int) -> None:
    frame = wire.pack_request(request)
    assert len(frame) == wire.REQUEST_BYTES
    assert wire.unpack_request(frame) == request
    answer = Answer(request.number, Outcome.GIVEN, request.length, crc32c)
    assert wire.unpack_answer(wire.pack_answer(answer), request) == answer
    refusal = Answer(request.number, Outcome.REFUSED)
    assert wire.unpack_answer(wire.pack_answer(refusal), request) == refusal
    wire.check_receipt(wire.pack_receipt(request.number), request.number)


@given(slabs, u64, st.integers(0, 2**32 - 1), st.integers(0, wire.NOTE_BYTES_MAX))
def test_answers_about_slabs_arrive(
    request: Request, length: int, crc32c: int, note_bytes: int
) -> None:
    assert wire.unpack_request(wire.pack_request(request)) == request
    given = Answer(request.number, Outcome.GIVEN, length % (request.length + 1), crc32c, note_bytes)
    others = [Answer(request.number, outcome) for outcome in (Outcome.REFUSED, Outcome.UNKNOWN)]
    for answer in (given, *others):
        assert wire.unpack_answer(wire.pack_answer(answer), request) == answer


@given(runs, u64, st.integers(0, 2**32 - 1))
def test_answers_about_runs_arrive(request: Request, length: int, crc32c: int) -> None:
    assert wire.unpack_request(wire.pack_request(request)) == request
    note_bytes = wire.run_note_bytes(request.count)
    given = Answer(request.number, Outcome.GIVEN, length % (request.length + 1), crc32c, note_bytes)
    for answer in (given, Answer(request.number, Outcome.REFUSED)):
        assert wire.unpack_answer(wire.pack_answer(answer), request) == answer


@pytest.mark.parametrize(
    ("count", "length"), [(wire.RUN_BLOCKS_MAX + 1, 5000), (2, wire.RUN_BYTES_MAX + 1)]
)
def test_a_run_is_bounded(count: int, length: int) -> None:
    request = Request(1, bytes(16), 0, 0, length, BlockForm.RAW, count)
    with pytest.raises(WrongFrameError, match="blocks"):
        wire.unpack_request(wire.pack_request(request))


ends = st.sampled_from([wire.GIVEN_WHOLE, wire.NOT_GIVEN]) | st.integers(1, wire.LENGTH_MAX)


@given(st.lists(st.tuples(st.integers(1, 9999), ends), min_size=2, max_size=9), st.integers(-1, 1))
def test_a_note_about_a_run_arrives_and_fits_the_payload(
    blocks: list[tuple[int, int]], wrong: int
) -> None:
    lengths, ends = [n for n, _ in blocks], tuple(end for _, end in blocks)
    note = wire.pack_run_note(ends)
    assert len(note) == wire.run_note_bytes(len(blocks))
    given = sum(n for n, end in blocks if end == wire.GIVEN_WHOLE)
    answer = Answer(1, Outcome.GIVEN, given + wrong)
    if not wrong:
        assert wire.unpack_run_note(note, answer, lengths) == ends
        return
    with pytest.raises(WrongFrameError, match="given"):
        wire.unpack_run_note(note, answer, lengths)


@pytest.mark.parametrize("body_bytes", [0, wire.BODY_BYTES_MAX + 1])
def test_a_request_for_a_slab_has_a_body_of_bounded_length(body_bytes: int) -> None:
    request = wire.slab_request(1, 100, bytes(body_bytes))
    with pytest.raises(WrongFrameError, match="slab"):
        wire.unpack_request(wire.pack_request(request))


@given(
    st.one_of(requests, slabs, runs), st.sampled_from(Outcome), u64, u64, st.integers(0, 2**32 - 1)
)
def test_an_answer_that_does_not_fit_the_request_is_refused(
    request: Request, outcome: Outcome, number: int, length: int, note_bytes: int
) -> None:
    answer = Answer(number, outcome, length, note_bytes=note_bytes)
    with contextlib.suppress(WrongFrameError):
        found = wire.unpack_answer(wire.pack_answer(answer), request)
        assert found.number == request.number
        is_slab = request.form is BlockForm.SLAB
        is_run = request.count > 1
        assert outcome is not Outcome.GIVEN or length == request.length or is_slab or is_run
        assert outcome is not Outcome.GIVEN or length <= request.length
        of_run = wire.run_note_bytes(request.count) if is_run else 0
        assert note_bytes <= (wire.NOTE_BYTES_MAX if is_slab else of_run)
        assert outcome not in {Outcome.REFUSED, Outcome.UNKNOWN} or length == note_bytes == 0
        assert outcome is not Outcome.UNKNOWN or is_slab
        is_one = request.form is BlockForm.RAW and not is_run
        assert outcome is not Outcome.ONLY_DECODED or is_one


@given(st.data())
def test_a_changed_frame_is_refused_or_another_valid_one(data: st.DataObject) -> None:
    request = data.draw(st.one_of(requests, slabs, runs))
    answer = Answer(request.number, Outcome.GIVEN, request.length, 1)
    frames = [
        (wire.pack_request(request), wire.unpack_request),
        (wire.pack_answer(answer), lambda frame: wire.unpack_answer(frame, request)),
        (wire.pack_receipt(request.number), lambda f: wire.check_receipt(f, request.number)),
        (handshake.pack_opening(data.draw(openings)), handshake.unpack_opening),
    ]
    frame, unpack = data.draw(st.sampled_from(frames))
    changed = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(changed[: data.draw(st.integers(0, len(changed)))])
    for each in (bytes(changed), cut):
        with contextlib.suppress(WrongFrameError):
            unpack(each)


@given(st.binary(min_size=handshake.OPENING_HEAD_BYTES, max_size=handshake.OPENING_HEAD_BYTES))
def test_no_opening_is_longer_than_the_longest(head: bytes) -> None:
    head = handshake.pack_opening(handshake.LineOpening("j", 1, "a", "l", bytes(32)))[:6] + head[6:]
    with contextlib.suppress(WrongFrameError):
        longest = handshake.OPENING_HEAD_BYTES + 3 * handshake.NAME_BYTES_MAX
        assert handshake.opening_bytes(head) <= longest


@given(openings, keys, keys, st.binary(min_size=32, max_size=32))
def test_both_sides_need_the_same_key(
    opening: handshake.LineOpening, key: bytes, other: bytes, nonce: bytes
) -> None:
    frame = handshake.pack_opening(opening)
    assert handshake.unpack_opening(frame) == opening
    challenge = handshake.pack_challenge(key, frame, nonce)
    proof = handshake.answer_challenge(key, frame, challenge)
    handshake.check_proof(key, frame, nonce, proof)
    if key != other:
        with pytest.raises(WrongFrameError, match="key"):
            handshake.answer_challenge(other, frame, challenge)
        with pytest.raises(WrongFrameError, match="key"):
            handshake.check_proof(other, frame, nonce, proof)
    # What one side has shown proves nothing for the other, or for another connection.
    reflected = proof[:4] + challenge[36:]
    with pytest.raises(WrongFrameError, match="key"):
        handshake.check_proof(key, frame, nonce, reflected)
    with pytest.raises(WrongFrameError, match="key"):
        handshake.check_proof(key, frame, bytes(x ^ 1 for x in nonce), proof)


def test_a_key_shows_in_no_value() -> None:
    key = bytes(range(32))
    neighbour = Neighbour("host:1", "job", 1, key, "a", "b", bytes(16), 0, 0)
    read = ReadRange(1, "s3://b/k", 0, "", 0, Region(0, 1), neighbour=neighbour)
    for value in (read, ToFetcher(read), ToLender(LendingKeys("job", 1, key))):
        assert repr(key) not in f"{value!r} {value}"
        assert key.hex() not in f"{value!r} {value}"
