"""Notices of `dataplane serve` to its supervisor, on a real notification socket."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from certificates import Authority
from fleet import ANSWER_S, Service, free_address, wait_until

SMALL = ("--block-arena-bytes", "16MiB", "--worker-count", "1")
COORDINATOR = ("--coordinator", "--listen", "127.0.0.1:0")


class Listener:
    """The socket of a service manager, and the environment of a service of it."""

    def __init__(self, sock: socket.socket, environ: dict[str, str]) -> None:
        self.sock, self.environ = sock, environ

    def notice(self) -> dict[str, str]:
        """The next notice that is no ping."""
        while True:
            lines = self.sock.recv(8192).decode().split("\n")
            if lines != ["WATCHDOG=1"]:
                return dict(line.split("=", 1) for line in lines)

    def wait_for(self, line: str) -> None:
        while line not in self.sock.recv(8192).decode().split("\n"):
            pass


@contextmanager
def listening(folder: Path, name: str = "") -> Iterator[Listener]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(ANSWER_S)
        named = name or str(folder / "notify")
        sock.bind(named.replace("@", "\0"))
        yield Listener(sock, {"NOTIFY_SOCKET": named, "DATAPLANE_STATE_DIR": str(folder / "state")})


@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_coordinator_says_that_it_is_ready_and_that_it_stops(tmp_path, is_abstract):
    name = f"@dataplane-test-{os.getpid()}" if is_abstract else ""
    with (
        listening(tmp_path, name) as listener,
        Service(*COORDINATOR, environ=listener.environ) as s,
    ):
        assert listener.notice() == {"READY": "1", "STATUS": f"coordinator {s.address}"}
        assert s.stop() == 0
        assert listener.notice() == {"STOPPING": "1", "STATUS": "draining"}


def test_a_node_is_ready_once_it_has_joined_its_coordinator(tmp_path):
    address = free_address()
    node = ("--node", "--join", address, *SMALL)
    with (
        listening(tmp_path) as listener,
        Service(*node, environ=listener.environ, log=tmp_path / "log", awaited=False) as service,
    ):
        assert service.log is not None
        service.log.wait_for("coordinator does not answer")
        listener.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.notice()
        listener.sock.settimeout(ANSWER_S)
        state = {"DATAPLANE_STATE_DIR": listener.environ["DATAPLANE_STATE_DIR"]}
        with Service("--coordinator", "--listen", address, environ=state):
            assert listener.notice() == {"READY": "1", "STATUS": f"node {address}"}
            assert service.stop() == 0


def test_the_event_loop_pings_the_watchdog_and_a_stopped_process_does_not(tmp_path):
    with listening(tmp_path) as listener:
        watched = {**listener.environ, "WATCHDOG_USEC": "200000"}
        with Service(*COORDINATOR, environ=watched) as service:
            for _ in range(3):
                listener.wait_for("WATCHDOG=1")
            service.process.send_signal(signal.SIGSTOP)
            while psutil.Process(service.process.pid).status() != psutil.STATUS_STOPPED:
                pass
            listener.sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while listener.sock.recv(8192):
                    pass
            listener.sock.settimeout(0.5)
            with pytest.raises(TimeoutError):
                listener.sock.recv(8192)


def test_the_watchdog_of_another_process_gets_no_pings(tmp_path):
    with listening(tmp_path) as listener:
        other = {**listener.environ, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
        with Service(*COORDINATOR, environ=other):
            assert listener.notice()["READY"] == "1"
            listener.sock.settimeout(0.2)
            with pytest.raises(TimeoutError):
                listener.sock.recv(8192)


def test_children_do_not_speak_for_a_service(tmp_path):
    with listening(tmp_path) as listener:
        both = ("--listen", "127.0.0.1:0", *SMALL)
        watched = {**listener.environ, "WATCHDOG_USEC": "60000000"}
        with Service(*both, environ=watched, within=("env",)) as service:
            children = psutil.Process(service.process.pid).children(recursive=True)
            assert children
            for child in children:
                assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & set(child.environ())


def test_a_notification_socket_that_is_missing_ends_nothing(tmp_path):
    environ = {"NOTIFY_SOCKET": str(tmp_path / "none"), "DATAPLANE_STATE_DIR": str(tmp_path)}
    with Service(*COORDINATOR, environ=environ, log=tmp_path / "log") as service:
        assert service.log is not None
        service.log.wait_for("the service manager takes no notices")
        assert service.stop() == 0


def test_sighup_reloads_what_it_can_and_says_what_it_cannot(tmp_path):
    authority = Authority.made()
    files = authority.write(tmp_path, "coordinator")
    settings = tmp_path / "settings.toml"
    settings.write_text('log_level = "info"\nlease_s = 20\n')
    given = (
        *COORDINATOR, "--config", str(settings), "--state-dir", str(tmp_path / "state"),
        "--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca,
    )  # fmt: skip
    with (
        listening(tmp_path) as listener,
        Service(*given, environ=listener.environ, log=tmp_path / "log") as service,
    ):
        assert service.log is not None
        assert listener.notice()["READY"] == "1"

        def reload() -> str:
            service.process.send_signal(signal.SIGHUP)
            assert listener.notice()["RELOADING"] == "1"
            ready = listener.notice()
            assert ready["READY"] == "1"
            return ready["STATUS"]

        assert reload() == (
            "reloaded: token_file unchanged, certificates unchanged, settings unchanged"
        )
        token = tmp_path / "state" / "token"
        token.write_text(token.read_text() + "another-token-of-24-bytes\n")
        authority.write(tmp_path, "coordinator")
        settings.write_text('log_level = "debug"\nlease_s = 30\n')
        assert reload() == (
            "reloaded: token_file read again, certificates read again, "
            "settings log_level=debug, need_a_restart lease_s"
        )
        service.log.wait_for("reloaded token_file=")
        token.write_text("short\n")
        settings.write_text("log_levle = 1\n")
        status = reload()
        assert "token_file cannot be read; what was read last stays" in status
        assert "settings unchanged, since they are wrong: " in status
        assert "did you mean log_level?" in status
        assert service.process.poll() is None
        assert service.stop() == 0


def test_a_terminal_that_is_closed_drains(tmp_path):
    terminal, own = pty.openpty()
    environ = {**os.environ, "DATAPLANE_STATE_DIR": str(tmp_path)}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-m", "dataplane", "serve", *COORDINATOR],
            stdin=own, stdout=subprocess.PIPE, stderr=log, env=environ, text=True,
        )  # fmt: skip
    try:
        os.close(own)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline().startswith("ready: coordinator ")
            process.send_signal(signal.SIGHUP)  # the terminal is there: this reloads
            wait_until(lambda: "reloaded" in (tmp_path / "log").read_text())
            os.close(terminal)
            terminal = -1
            assert process.wait(ANSWER_S) == 0
        assert "draining; a second signal stops at once by=SIGHUP" in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
        if terminal >= 0:
            os.close(terminal)
