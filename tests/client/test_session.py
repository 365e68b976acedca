"""How a trainer reaches a node, and what it does when that fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from pathlib import Path

import pytest
from fake_node import Script, open_job, serving, steps_of
from fleet import wait_until
from forked import forking

from dataplane.client import waiting
from dataplane.client.endpoint import Embedded, Served, find_endpoint
from dataplane.client.launch import node_command
from dataplane.client.session import Session
from dataplane.client.stream import SlabStream
from dataplane.model.errors import (
    ClosedError,
    ConfigError,
    DataStallError,
    PeerLost,
    VersionMismatch,
)
from dataplane.rpc import local
from dataplane.rpc.address import served_name
from dataplane.rpc.messages import CloseJob, CloseStream, OpenJob, Release


def inode_of(fd: int) -> int | None:
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return None


def test_a_job_is_opened_once_and_closed_with_the_session(fake, session) -> None:
    node, mine = fake(), session()
    assert mine.job is mine.job
    assert sum(isinstance(one, OpenJob) for one in node.seen) == 1
    mine.close()
    mine.close()
    wait_until(lambda: node.seen[-1] == "gone")
    assert isinstance(node.seen[-2], CloseJob)
    with pytest.raises(ClosedError):
        _ = mine.job


def test_a_session_that_is_closed_while_its_job_opens_leaves_the_job(
    fake, session, monkeypatch
) -> None:
    node, mine = fake(), session()
    open_job = node._open_job

    def closing(*arguments) -> None:
        mine.close()
        open_job(*arguments)

    monkeypatch.setattr(node, "_open_job", closing)
    with pytest.raises(ClosedError, match="closed while its job was opened"):
        _ = mine.job
    wait_until(lambda: node.seen[-1] == "gone")
    assert isinstance(node.seen[-2], CloseJob)


def test_a_node_of_another_protocol_is_refused(fake, session) -> None:
    fake(protocol=2)
    with pytest.raises(VersionMismatch, match=r"dataplane 0\.0\.7") as caught:
        _ = session().job
    assert caught.value.found == 2


def test_the_nodes_error_is_raised_unchanged(fake, session) -> None:
    fake(open_error="there is no column 'y'")
    with pytest.raises(ConfigError, match="no column 'y'"):
        _ = session().job


def test_if_no_service_answers_the_error_says_what_to_start(monkeypatch, name) -> None:
    monkeypatch.setenv("DATAPLANE_STALL_TIMEOUT_S", "0.2")
    mine = Session(Served("host:7077", name), open_job())
    with pytest.raises(PeerLost, match="dataplane serve --node --join host:7077") as caught:
        _ = mine.job
    assert "Connection refused" in str(caught.value)
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


def test_a_listener_that_never_answers_is_not_taken_for_a_node(monkeypatch, name) -> None:
    monkeypatch.setenv("DATAPLANE_STALL_TIMEOUT_S", "0.2")
    with local.listen(name), pytest.raises(PeerLost, match="does not answer"):
        _ = Session(Served("host:7077", name), open_job()).job


def test_a_node_that_opens_no_job_in_time_is_reported(fake, session, monkeypatch) -> None:
    node = fake()
    monkeypatch.setattr(node, "_open_job", lambda *_: None)
    with pytest.raises(DataStallError, match=r"job 'job' over s3://bucket.*index") as caught:
        _ = session(open_timeout_s=0.2).job
    assert caught.value.job == "job"
    assert caught.value.node == f"fake-{os.getpid()}"


def test_service_names_are_normal_and_one_per_user() -> None:
    assert served_name(1, "Host:7077") == served_name(1, " host:7077 ")
    assert served_name(1, "localhost:7077") == served_name(1, "127.0.0.1:7077")
    assert served_name(1, "unix:/a/B") != served_name(1, "unix:/a/b")
    assert served_name(1, "host:7077") != served_name(2, "host:7077")
    assert isinstance(find_endpoint(None, "run"), Embedded)
    with pytest.raises(ConfigError, match="not an address"):
        find_endpoint("host", "run")


def test_the_first_of_many_starts_the_node_and_all_share_it(embedded) -> None:
    first = embedded()
    sessions = [first, *(Session(first.endpoint, open_job()) for _ in range(3))]
    threads = [threading.Thread(target=lambda s=one: s.job) for one in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pids = set()
    for one in sessions:
        pids.add(one.mount().node_id)
        one.close()
    assert len(pids) == 1


def test_a_node_that_dies_while_starting_reports_the_end_of_its_output(embedded) -> None:
    with pytest.raises(PeerLost, match="exit status 3") as caught:
        _ = embedded(die_at_start="Traceback\nImportError: no module named nothing\n").job
    assert "no module named nothing" in str(caught.value)
    assert caught.value.last_error == "ImportError: no module named nothing"


def test_every_rank_learns_why_the_shared_node_does_not_start(embedded) -> None:
    first = embedded(die_at_start="broken\n")
    errors = []

    def open_it(one: Session) -> None:
        try:
            _ = one.job
        except PeerLost as error:
            errors.append(str(error))

    threads = [
        threading.Thread(target=open_it, args=(Session(first.endpoint, open_job()),))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [("broken" in error) for error in errors] == [True] * 3


def test_a_node_that_cannot_be_executed_is_a_config_error(name) -> None:
    mine = Session(Embedded(name, ("no-such-interpreter",)), open_job())
    with pytest.raises(ConfigError, match="cannot start a node"):
        _ = mine.job


def test_a_real_node_names_a_wrong_setting(name, monkeypatch) -> None:
    monkeypatch.setenv("DATAPLANE_SLAB_BYTES", "plenty")
    mine = Session(Embedded(name, node_command()), open_job())
    with pytest.raises(ConfigError, match=r"DATAPLANE_SLAB_BYTES.*plenty"):
        _ = mine.job


def test_a_killed_node_is_started_again_and_the_next_step_comes_next(embedded) -> None:
    mine = embedded(sample_count=60)
    stream, step, seen, pids = SlabStream(mine, 0, 0), 0, [], []
    while slabs := stream.batches_from(step):
        seen += [batch.step for slab in slabs for batch in slab.batches]
        step = seen[-1] + 1
        pids.append(int(mine.mount().node_id.removeprefix("fake-")))
        if len(pids) == 2:
            os.kill(pids[-1], signal.SIGKILL)
    stream.close()
    assert seen == list(range(15))
    assert len(set(pids)) == 2


def test_a_node_that_always_dies_ends_in_an_error_not_in_a_loop(embedded) -> None:
    mine = embedded(die_after=0, stall_timeout_s=3.0)
    stream = SlabStream(mine, 0, 0)
    with pytest.raises(DataStallError, match="step 0 of epoch 0") as caught:
        stream.batches_from(0)
    assert caught.value.last_error
    stream.close()


def test_a_node_that_cannot_be_started_again_says_so_soon(embedded) -> None:
    mine = embedded()
    stream = SlabStream(mine, 0, 0, ahead=False)
    stream.batches_from(0)
    pid = int(mine.mount().node_id.removeprefix("fake-"))
    embedded(die_at_start="no memory left\n")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match="no memory left"):
        stream.batches_from(1)
    stream.close()


def test_a_service_that_restarts_is_found_again_by_the_same_member(name, session) -> None:
    mine = session()
    stream = SlabStream(mine, 0, 0)
    with serving(Script(), name) as first:
        assert stream.batches_from(0)[0].batches[0].step == 0
        (opened,) = (one for one in first.seen if isinstance(one, OpenJob))
    with serving(Script(), name) as second:
        slabs = stream.batches_from(1)
        assert slabs[0].batches[0].step == 1
        (again,) = (one for one in second.seen if isinstance(one, OpenJob))
        assert again == opened
        stream.close()
        del slabs
        mine.close()


def test_a_silent_node_is_a_stall_that_says_what_was_waited_for(fake, session) -> None:
    fake(hang_after=1, stall_timeout_s=1.5)
    stream = SlabStream(session(), 3, 8)
    stream.batches_from(0)
    with pytest.raises(
        DataStallError, match=r"step 1 of epoch 3 \(from cursor 8\).*fake"
    ) as caught:
        stream.batches_from(1)
    assert caught.value.stage == "node"
    assert stream.stall_s > 1.5
    stream.close()


def test_the_users_timeout_takes_precedence_over_the_nodes(fake, session) -> None:
    fake(hang_after=0, stall_timeout_s=100.0)
    stream = SlabStream(session(stall_timeout_s=0.1), 0, 0)
    with pytest.raises(DataStallError, match=r"within 0\.1 s"):
        stream.batches_from(0)
    stream.close()


def test_streams_of_several_threads_share_one_connection(fake, session) -> None:
    node, mine = fake(sample_count=200), session()
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(steps_of(mine))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(range(50))] * 4
    assert sum(isinstance(one, OpenJob) for one in node.seen) == 1


def test_every_request_carries_progress_and_stall(fake, session) -> None:
    node = fake()
    stream = SlabStream(session(), 0, 0)
    stream.batches_from(0)
    stream.consumed = 4
    stream.batches_from(1)
    stream.consumed = 16
    stream.batches_from(4)
    wait_until(lambda: [o.cursor for o in node.seen if hasattr(o, "stall_s")][-1] == 16)
    stream.close()


def test_ctrl_c_while_waiting_loses_nothing(fake, session, monkeypatch) -> None:
    node, mine = fake(), session()
    stream = SlabStream(mine, 0, 0, ahead=False)
    stream.batches_from(0)
    before, give = mine.mount(), node._give

    def interrupt(*_given) -> None:
        """Interrupt the trainer once while it waits: during a send it would cost a connection."""
        monkeypatch.setattr(node, "_give", lambda *_: False)
        wait_until(lambda: before.wire.is_waiting)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(node, "_give", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stream.batches_from(1)
    monkeypatch.setattr(node, "_give", give)
    other = SlabStream(mine, 0, 0)
    assert other.batches_from(0)[0].batches[0].step == 0
    assert stream.batches_from(1)[0].batches[0].step == 1
    assert mine.mount() is before
    other.close()
    stream.close()


def interrupt_after(monkeypatch, place: object, name: str) -> None:
    """Press Ctrl-C once, when the main thread returns from this function."""
    real = getattr(place, name)

    def interrupted(*given):
        if threading.current_thread() is not threading.main_thread():
            return real(*given)
        monkeypatch.setattr(place, name, real)
        real(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(place, name, interrupted)


@pytest.mark.parametrize("at", ["receive", "dispatch", "wait"])
def test_ctrl_c_in_the_moment_of_receiving_costs_a_connection_and_no_batch(
    fake, session, monkeypatch, at
) -> None:
    node, mine = fake(sample_count=80), session()
    stream = SlabStream(mine, 0, 0)
    kept = stream.batches_from(0)
    first_bytes = kept[0].memory.tobytes()
    mount = mine.mount()
    wire = mount.wire
    spots = {"receive": (local, "receive"), "dispatch": (wire, "_dispatch"), "wait": (wire, "wait")}
    interrupt_after(monkeypatch, *spots[at])
    with pytest.raises(KeyboardInterrupt):
        stream.batches_from(1)
    step, seen = 1, []
    while slabs := stream.batches_from(step):
        seen += [batch.step for slab in slabs for batch in slab.batches]
        step = seen[-1] + 1
    assert seen == list(range(1, 20))
    assert mine.mount() is not mount
    # The old connection lives as long as batches of it are held.
    assert kept[0].memory.tobytes() == first_bytes
    stream.close()
    gone = weakref.ref(mount)
    monkeypatch.undo()
    del kept, mount, wire, slabs, spots
    gc.collect()
    assert gone() is None
    wait_until(lambda: node.free_count == node.slots.layout.slot_count)


def test_a_fork_of_the_trainer_owns_nothing(fake, session) -> None:
    node, mine = fake(), session()
    stream = SlabStream(mine, 0, 0)
    held = stream.batches_from(0) + stream.batches_from(1)
    before = [one.memory.tobytes() for one in held]
    inode = os.fstat(mine.mount().wire._sock.fileno()).st_ino
    child = os.fork()
    if not child:
        del held, stream
        gc.collect()
        mine.close()
        os._exit(any(inode_of(fd) == inode for fd in range(256)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stream.batches_from(4)  # after a round trip, the node has seen all that the child sent
    assert not any(isinstance(one, Release) for one in node.seen)
    assert "gone" not in node.seen
    assert [one.memory.tobytes() for one in held] == before
    stream.close()


def test_a_loader_made_before_a_fork_works_in_the_child_by_itself(fake, session) -> None:
    node, mine = fake(), session()
    stream = SlabStream(mine, 0, 0)
    stream.batches_from(0)
    child = os.fork()
    if not child:
        ok = steps_of(mine) == list(range(25)) and stream.batches_from(1)[0].batches[0].step == 1
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len({one.member_id for one in node.seen if isinstance(one, OpenJob)}) == 2
    assert stream.batches_from(1)[0].batches[0].step == 1
    stream.close()


def test_tensors_outlive_the_session_and_then_the_connection_goes(fake, session) -> None:
    node, mine = fake(), session()
    stream = SlabStream(mine, 0, 0)
    held = stream.batches_from(0)
    before = held[0].memory.tobytes()
    stream.close()
    mine.close()
    assert "gone" not in node.seen
    assert held[0].memory.tobytes() == before
    del held
    wait_until(lambda: node.seen[-1] == "gone")


def test_what_a_trainer_links_opens_no_network_and_is_light() -> None:
    code = (
        "import sys, dataplane.client.stream\n"
        "heavy = {'torch', 'grpc', 'pyarrow', 'asyncio', 'obstore', 'fsspec'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""


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


def test_slabs_that_a_forked_child_can_read_are_not_used_again(fake, session) -> None:
    node, mine = fake(), session()
    stream = SlabStream(mine, 0, 0)
    held = stream.batches_from(0)
    before = held[0].memory.tobytes()
    with forking(lambda: int(held[0].memory.tobytes() != before)) as child:
        held.clear()
        step = 1
        while slabs := stream.batches_from(step):  # returned memory is overwritten
            step += sum(len(each.batches) for each in slabs)
            del slabs
        assert mine.mount().held_bytes > 0
        assert child.ask() == 0
    stream.close()
    assert mine.mount().held_bytes == 0
    wait_until(lambda: node.free_count == node.slots.layout.slot_count)


def test_the_end_of_a_process_that_holds_batches_leaves_the_job_with_its_place(fake, name) -> None:
    node = fake()
    code = (
        "import sys\n"
        "from fake_node import open_job\n"
        "from dataplane.client.endpoint import Served\n"
        "from dataplane.client.session import Session\n"
        "from dataplane.client.stream import SlabStream\n"
        "stream = SlabStream(Session(Served('host:1', sys.argv[1]), open_job()), 3, 8)\n"
        "held = stream.batches_from(0)\n"
        "stream.consumed = 12\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code, name],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: node.seen[-1] == "gone")
    assert node.seen[-2] == CloseJob("job", 3, 12, holds_slabs=True)


def test_a_stream_that_is_left_reports_its_progress(fake, session) -> None:
    node = fake()
    stream = SlabStream(session(), 0, 0)
    stream.batches_from(0)
    stream.consumed = 4
    stream.close()
    wait_until(lambda: [o.cursor for o in node.seen if isinstance(o, CloseStream)] == [4])


def test_a_wait_for_a_service_says_soon_what_helps_and_how_long_it_takes(
    monkeypatch, name, caplog
) -> None:
    monkeypatch.setenv("DATAPLANE_STALL_TIMEOUT_S", "0.5")
    monkeypatch.setattr(waiting, "TELL_AFTER_S", 0.0)
    with pytest.raises(PeerLost):
        _ = Session(Served("host:7077", name), open_job()).job
    first = caplog.messages[0]
    assert "waiting for a node of service host:7077 on this host for at most " in first
    assert "start `dataplane serve` here, or `dataplane serve --node --join host:7077`" in first
