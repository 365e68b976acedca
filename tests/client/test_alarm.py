"""An exception from a user's signal handler reaches the user unchanged."""

from __future__ import annotations

import signal

import pytest

from dataplane.client.stream import SlabStream


def test_a_timeout_of_the_users_own_stays_theirs(fake, session, monkeypatch) -> None:
    node = fake(hang_after=0)

    def ring(*_: object) -> None:
        raise TimeoutError("the user's own")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        stream = SlabStream(session(), 0, 0)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError, match="the user's own"):
            stream.batches_from(0)
        stream.close()
        monkeypatch.setattr(node, "_open_job", lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError, match="the user's own"):
            _ = session().job
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
