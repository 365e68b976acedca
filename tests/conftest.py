"""Fixtures of all tests: a clean environment, real data, a real S3 server."""

from __future__ import annotations

import asyncio
import gc
import inspect
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import fleet
import held_loops
import hygiene
import pytest
from hypothesis import HealthCheck, settings
from servers import awry, careless_s3_server, port_of_nobody, s3_server
from warm import (
    SERVICE,
    SERVICES,
    TRAINER,
    WarmPython,
    start_fork_servers_by_forks,
    start_nodes_by_forks,
    warm_python,
)

from dataplane.base import trace
from dataplane.base.trace import LogLimits
from dataplane.worker import forking

__all__ = ["awry", "careless_s3_server", "port_of_nobody", "s3_server"]

# With Python 3.14, the default is a fork server, which outlives the test that starts it.
multiprocessing.set_start_method("fork", force=True)  # set twice if a test imports this module

# In one process with tests that fork: gRPC would start its threads again in each child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Threads of torch wait for each other by spinning, and several tests share few processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With a second or more, nodes of loaders of this process would stay for their next one.
os.environ.setdefault("DATAPLANE_LINGER_S", "0.9")

# A shell has what runs in its background ignore SIGINT, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# `nohup` does the same with SIGHUP, and a service that ignores it reloads nothing.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The trees of all tests are millions of objects, and none is garbage: a third of the time.
gc.disable()

ROOT = Path(__file__).resolve().parents[1]

# Two runs of one commit test the same examples. `HYPOTHESIS_PROFILE=explore` looks further.
settings.register_profile(
    "fixed",
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=2000)
# Other versions of packages: what they do may differ, and not what was looked for in examples.
settings.register_profile("few", settings.get_profile("fixed"), max_examples=15)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

_failed = pytest.StashKey[bool]()


def pytest_collection_finish() -> None:
    """Look for garbage again, now that all tests are collected."""
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember failures, since files and memory held by their tracebacks are not leaks."""
    report = yield
    if report.failed:
        item.stash[_failed] = True
    if report.when == "teardown" and report.passed and not item.stash.get(_failed, False):
        expect_no_hold(item, report)
    return report


def expect_no_hold(test: pytest.Item, report: pytest.TestReport) -> None:
    """Fail the test of this report if one of its nodes has held its event loop."""
    line = held_loops.longest_hold(text for _, text in report.sections)
    if line is not None and test.get_closest_marker(held_loops.MAY_HOLD) is None:
        report.outcome = "failed"
        report.longrepr = f"a node of this test held its event loop:\n  {line}"


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """Have `hygiene` read what a fixture of several tests maps."""
    if fixturedef.scope != "function":
        hygiene.memfds_in.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """Hide what the collection of tests and earlier modules have imported and keep from the garbage
    collector.

    Otherwise each collection costs 0.3 s of CPU, and `hygiene` collects until nothing is left of a
    test.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def run_mark(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The mark that identifies descendants of this test run."""
    # pytest's own folder must be there before the first test gets a TMPDIR that is emptied.
    tmp_path_factory.getbasetemp()
    hygiene.warm_up()
    return hygiene.mark_run()


@pytest.fixture(scope="session", autouse=True)
def warm_services(run_mark: str) -> Iterator[None]:
    """Services, nodes, and fork servers of this process have their modules when they start."""
    with warm_python(*SERVICE) as python, pytest.MonkeyPatch.context() as patch:
        fleet.WARM_SERVICES.append(python)
        patch.setenv(SERVICES, f"{python.address} {python.pid}")
        start_nodes_by_forks(python, patch.setattr)
        start_fork_servers_by_forks(python, patch)
        yield
        fleet.WARM_SERVICES.remove(python)


@pytest.fixture(scope="module")
def one_fork_server(run_mark: str) -> Iterator[None]:
    """A fork server for all tests of a module: it takes half a second to start."""
    with forking.fork_server.held():
        yield


@pytest.fixture(scope="session")
def warm_torch(run_mark: str) -> Iterator[WarmPython]:
    """The process that trainers are forked from, those of `fleet.Run` among them: one for all tests."""
    with warm_python(*TRAINER) as python:
        fleet.WARM.append(python)
        yield python
        fleet.WARM.remove(python)


@pytest.fixture(autouse=True)
def leaves_nothing(run_mark: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, fd, memfd, thread, /dev/shm or temporary file behind."""
    usual = tempfile.gettempdir()
    # Short, since Unix socket paths have at most 107 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="dp-", dir=usual))
    environment = os.environ.get("TMPDIR")
    tempfile.tempdir, os.environ["TMPDIR"] = str(scratch), str(scratch)
    before = hygiene.take()
    left: list[str] | None = None
    try:
        yield
        left = hygiene.wait_until_clean(before, scratch)
    finally:
        if left != []:
            hygiene.kill_new(before)
        hygiene.empty(scratch)
        tempfile.tempdir = usual
        if environment is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = environment
    if left and not request.node.stash.get(_failed, False):
        pytest.fail("this test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def fresh_log_limits() -> None:
    """A process writes so many lines of an event a minute: no test uses up those of another."""
    for each in list(trace._traces):
        each._limits = LogLimits()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real shards; its README says what each was made from."""
    folder = Path(os.environ.get("DATAPLANE_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real shards under {folder}; name their folder in DATAPLANE_TEST_DATA")
    return folder
