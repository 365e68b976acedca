"""How a data connection is opened: both sides show that they have the key of the job's generation,
which neither sends. Pure.

    asker   Opening    who asks whom, for which job and generation, and a nonce
    lender  Challenge  a nonce, and HMAC-SHA256(key, "lender", all of the opening, nonce)
    asker   Proof      HMAC-SHA256(key, "asker", all of the opening, nonce)

Each proof covers both nonces, so a recorded one is worth nothing, and the role, so a proof cannot
be sent back to the side that made it. A key is only as old as its generation.

What is sent later is not signed: against somebody who can change packets on the way, the network
must be trusted, or the connection be inside of TLS (line_tls.py).
"""

from __future__ import annotations

import hashlib
import hmac

from dataplane.model.records import Unsigned
from dataplane.neighbours.wire import WrongFrameError, pack, unpack
from dataplane.rpc.codec import Message

NONCE_BYTES = 32
KEY_BYTES = 32
HANDSHAKE_S = 2.0
"""From the first byte to the last."""
ONE_SIDE = "peer_tls is set on one side only"
TLS_HELLO = 0x16
"""The first byte of a connection with TLS."""
TLS_ALERT = bytes.fromhex("1503030002020a")
"""The plain-text alert of TLS about an unexpected message, from a side that expects TLS and gets
something else, or the other way round, so that both know.
"""


class Opening(Message, frozen=True):
    """The first message of a connection."""

    job_id: str
    generation: Unsigned
    asker_id: str
    lender_id: str
    nonce: bytes


class Challenge(Message, frozen=True):
    """The lender's answer to an opening."""

    nonce: bytes
    proof: bytes


class Proof(Message, frozen=True):
    """The asker's answer to a challenge."""

    proof: bytes


def check_plain(first: bytes | bytearray) -> None:
    """Check that a peer does not use TLS.

    Raises:  WrongFrameError: these are the first bytes of a TLS connection.
    """
    if first[0] in {TLS_HELLO, TLS_ALERT[0]}:
        raise WrongFrameError(ONE_SIDE)


def unpack_opening(frame: bytes) -> Opening:
    """Raises:  WrongFrameError."""
    opening = unpack(Opening, frame)
    if len(opening.nonce) != NONCE_BYTES:
        raise WrongFrameError(f"an opening with a nonce of {len(opening.nonce)} bytes")
    return opening


def pack_challenge(key: bytes, opening: bytes, nonce: bytes) -> bytes:
    """Return the lender's answer to this opening."""
    return pack(Challenge(nonce, _proof(key, b"lender", opening, nonce)))


def answer_challenge(key: bytes, opening: bytes, frame: bytes) -> bytes:
    """Return the asker's answer to this challenge.

    Raises:  WrongFrameError: the lender does not have the key.
    """
    challenge = unpack(Challenge, frame)
    nonce = challenge.nonce
    is_proof = hmac.compare_digest(challenge.proof, _proof(key, b"lender", opening, nonce))
    if len(nonce) != NONCE_BYTES or not is_proof:
        raise WrongFrameError("it does not have the key of this generation")
    return pack(Proof(_proof(key, b"asker", opening, nonce)))


def check_proof(key: bytes, opening: bytes, nonce: bytes, frame: bytes) -> None:
    """Check the asker's proof.

    Raises:  WrongFrameError: the asker does not have the key.
    """
    if not hmac.compare_digest(unpack(Proof, frame).proof, _proof(key, b"asker", opening, nonce)):
        raise WrongFrameError("it does not have the key of this generation")


def _proof(key: bytes, role: bytes, opening: bytes, nonce: bytes) -> bytes:
    # Unambiguous: the opening begins with its length, the nonce's is fixed, and no role begins
    # another.
    return hmac.digest(key, role + b"\0" + opening + nonce, hashlib.sha256)
