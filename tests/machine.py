"""A coordinator's state machine with a clock and a disk, for its tests."""

from membership import SPEC, VERSION, beat, progress
from msgspec import structs

from dataplane.coordinator.records import Keep, Tick, key_of
from dataplane.coordinator.state import CoordinatorState
from dataplane.model.config import PROTOCOL_VERSION
from dataplane.rpc.membership import StatusRequest

LEASE_S = 30.0


class Machine:
    """A state machine with a clock, and a disk that keeps every write."""

    def __init__(self):
        self.now = 1_000_000.0
        self.salt = b"salt"
        self.disk = {}
        self.writes = ()
        self.restart()

    def restart(self):
        self.state = CoordinatorState(
            coordinator_id="c",
            version=VERSION,
            protocol=PROTOCOL_VERSION,
            lease_s=LEASE_S,
            now=self.now,
            records=[write.record for write in self.disk.values()],
            salt=self.salt,
        )

    def ask(self, event):
        decision = self.state.decide(event, self.now)
        self.writes = decision.writes
        for write in decision.writes:
            if isinstance(write, Keep):
                self.disk[key_of(write)] = write
            else:
                self.disk.pop(key_of(write), None)
        return decision.answer

    def wait(self, seconds):
        """Let time pass while the coordinator is awake."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 1.0, until)
            self.ask(Tick())

    def verdict(self, *args, **kwargs):
        (verdict,) = self.ask(beat(progress(*args, **kwargs))).verdicts
        return verdict

    def job(self, job="j"):
        (found,) = self.ask(StatusRequest(job)).jobs
        return found

    def phases(self):
        return {member.member_id: member.state for member in self.job().members}


def other(**changes):
    """The usual spec, changed."""
    return structs.replace(SPEC, **changes)
