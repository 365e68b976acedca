"""The keys of a lender, and its part of the handshake. No socket."""

from __future__ import annotations

import secrets

from dataplane.neighbours import handshake
from dataplane.neighbours.connection import Connection, LoanStage
from dataplane.neighbours.wire import WrongFrameError
from dataplane.rpc.lending import LendingKeys

_LEFT_MAX = 256


class LeftJobError(WrongFrameError):
    """A neighbour does not know yet that a job has left this node."""


class Keys:
    """The newest key of each job of a node."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._keys: dict[str, LendingKeys] = {}
        self._left: dict[str, int] = {}
        """The generations of jobs that have left, the latest at the end."""

    def learn(self, key: LendingKeys) -> None:
        """Replace the job's key; b"" removes it."""
        if key.key:
            self._keys[key.job_id] = key
        elif (former := self._keys.pop(key.job_id, None)) is not None:
            self._left.pop(key.job_id, None)
            self._left[key.job_id] = former.generation
            if len(self._left) > _LEFT_MAX:
                del self._left[next(iter(self._left))]

    def are_of(self, opening: handshake.LineOpening) -> bool:
        """Whether the opening's generation is the job's newest."""
        key = self._keys.get(opening.job_id)
        return key is not None and key.generation == opening.generation

    def challenge(self, connection: Connection, frame: bytes) -> bytes:
        """Return the answer to an opening.   Raises:  WrongFrameError."""
        opening = connection.opening = handshake.unpack_opening(frame)
        connection.frame, connection.nonce = frame, secrets.token_bytes(handshake.NONCE_BYTES)
        connection.stage = LoanStage.PROOF
        return handshake.pack_challenge(self._key(opening).key, frame, connection.nonce)

    def check(self, connection: Connection, frame: bytes) -> None:
        """Let the connection in.   Raises:  WrongFrameError: the proof is wrong."""
        assert connection.opening is not None
        key = self._key(connection.opening)
        handshake.check_proof(key.key, connection.frame, connection.nonce, frame)
        connection.frame = connection.nonce = b""
        connection.only_under = key.only_under

    def _key(self, opening: handshake.LineOpening) -> LendingKeys:
        if opening.lender_id != self._node_id:
            raise WrongFrameError("it asks for another node")
        key = self._keys.get(opening.job_id)
        if key is None and self._left.get(opening.job_id) == opening.generation:
            raise LeftJobError("the job has left this node")
        if key is None:
            raise WrongFrameError("this node has no such job")
        if key.generation != opening.generation:
            raise WrongFrameError(f"it is of generation {opening.generation}, not {key.generation}")
        return key
