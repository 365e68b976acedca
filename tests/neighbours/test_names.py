"""Host names of neighbours, and a resolver that does not answer."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dataplane.model.errors import ConfigError
from dataplane.neighbours.asking import Names
from dataplane.rpc.address import TcpAddress

NAME, HERE = TcpAddress("node-7.invalid", 7), TcpAddress("127.0.0.1", 7)


class Resolver:
    """Answers when `may_answer` is set, with the first of `answers`."""

    def __init__(self, *answers: TcpAddress | ConfigError) -> None:
        self.answers, self.asked = [*answers], 0
        self.may_answer = threading.Event()

    def __call__(self, _address: TcpAddress) -> TcpAddress:
        self.asked += 1
        self.may_answer.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, ConfigError):
            raise answer
        return answer


def test_a_resolver_that_does_not_answer_holds_nobody() -> None:
    resolver = Resolver(HERE)
    names = Names(resolver)
    try:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                names.find(NAME, 0.01)
        assert resolver.asked == 1
    finally:
        resolver.may_answer.set()
    assert names.find(NAME, 60.0) == (socket.AF_INET, ("127.0.0.1", 7))
    assert names.find(NAME, 0.0) == (socket.AF_INET, ("127.0.0.1", 7))
    assert resolver.asked == 1


def test_a_failure_is_told_to_all_who_wait_and_asked_again_later() -> None:
    resolver = Resolver(ConfigError("no such name"), HERE)
    names = Names(resolver)
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(names.find, NAME, 60.0) for _ in range(4)]
        resolver.may_answer.set()
        ends = [each.exception() for each in waiting]
    assert any(isinstance(end, ConfigError) for end in ends)
    assert names.find(NAME, 60.0)[1] == ("127.0.0.1", 7)
    assert resolver.asked == 2


def test_numbers_are_not_looked_up() -> None:
    names = Names(Resolver())
    assert names.find(TcpAddress("10.0.0.1", 3), 0.0) == (socket.AF_INET, ("10.0.0.1", 3))
    assert names.find(TcpAddress("::1", 3), 0.0) == (socket.AF_INET6, ("::1", 3))
