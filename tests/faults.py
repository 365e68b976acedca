"""Injects six faults into a real service, one after another, and checks that each is named rightly: by
the metrics, by `dataplane status` and `dataplane doctor`, and by the alert that fires in a Prometheus.

python tests/faults.py [--picture FILE] [FAULT …], four minutes for all; ends with 1 if one is named
wrongly. Windows of alert rules are 30 times shorter than in deploy/prometheus, and all else is as it is
there. The picture, for docs/metrics.md, is that of Prometheus during the slow store.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import scrapes
from awry import Awry, Mood, awry_server
from browser import LivePage
from fleet import DATAPLANE, Service
from trusted import TOKEN

FASTER = 30
SHOWN_S = 120.0
"""How long a fault may take until all name it; ends only a failure."""
ROWS, ROW_BYTES, GROUP = 400, 2048, 20
SMALL = ("--block-arena-bytes", "1MiB", "--slab-bytes", "64KiB", "--worker-count", "1",
         "--delivery-bytes-per-rank", "512KiB", "--lease-s", "3", "--stall-timeout-s", "600",
         "--fetch-timeout-s", "8", "--allowed-functions", "user_functions:")  # fmt: skip

GRAPH = "max by (stage) (rate(dataplane_exposed_seconds_total[10s]))"

_pause = threading.Event()


def _observe() -> Any:
    path = Path(__file__).parents[1] / "deploy" / "prometheus" / "observe.py"
    spec = importlib.util.spec_from_file_location("observe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(slots=True)
class Scene:
    """A coordinator with a node, a second node, a rank at each, and what watches them."""

    store: Awry
    services: list[Service]
    prometheus: Any

    def bounds(self) -> dict[int, str]:
        """The stage that bounds each rank, as `dataplane status` says."""
        members = [member for job in self.status()["jobs"] for member in job["members"]]
        return {
            member["topology"]["dp_rank"]: member["bound"]
            for member in members
            if member["state"] == "joined"
        }

    def status(self) -> Any:
        command = [*DATAPLANE, "status", self.services[0].address, "--json"]
        environ = os.environ | {"DATAPLANE_TOKEN": TOKEN}
        return json.loads(
            subprocess.run(command, env=environ, capture_output=True, check=True).stdout
        )

    def exposed(self) -> tuple[str, float]:
        """The stage that ranks wait for most, and the share of the time; "" for none. All of it
        for a wait that has not ended.
        """
        rates = self.prometheus.query(
            "max by (stage) (dataplane_waiting_seconds > bool 5) > 0 or "
            "max by (stage) (rate(dataplane_exposed_seconds_total[10s])) > 0"
        )
        return max(((labels["stage"], rate) for labels, rate in rates),
                   key=lambda of: of[1], default=("", 0.0))  # fmt: skip

    def value(self, expr: str) -> float:
        """The largest value of an expression, 0 without any."""
        return max((value for _, value in self.prometheus.query(expr)), default=0.0)

    def alerts(self) -> set[str]:
        """The alerts that fire, with the label that says what they are about."""
        return {
            " ".join(filter(None, (labels["alertname"].removeprefix("Dataplane"),
                                   labels.get("stage") or labels.get("kind"))))
            for labels in self.prometheus.firing()
        }  # fmt: skip


# -- faults ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """How it is injected, what names it, and what each must say. `inject` returns what ends it."""

    inject: Callable[[Scene], Callable[[], None]]
    metric: str
    """True while the metrics name the fault."""
    stage: str
    """The stage of dataplane_exposed_seconds_total; "" if trainers hardly wait."""
    bound: str
    """The bound of rank 0 by `dataplane status`, and the run of `dataplane doctor`; "" for none."""
    alerts: frozenset[str]
    """All of these fire at some time, and no other but those of `may`."""
    may: frozenset[str] = frozenset()
    map: str = ""
    step_s: float = 0.02
    has_run: bool = True
    """Whether the same fault meets a run of `dataplane doctor URL`."""
    service: str = ""
    """What `dataplane doctor --join` says of the service; "" if all is well."""
    faster: int = FASTER


def _mood(usual: Mood, *pattern: Mood) -> Callable[[Scene], Callable[[], None]]:
    def inject(scene: Scene) -> Callable[[], None]:
        scene.store.moods, scene.store.usual = deque([*pattern, usual] * 10_000), usual
        return scene.store.be

    return inject


def _nothing(_: Scene) -> Callable[[], None]:
    return lambda: None


def _kill_node(scene: Scene) -> Callable[[], None]:
    scene.services[1].kill()
    return scene.services[1].start


def _hang_fetchers(scene: Scene) -> Callable[[], None]:
    """Stop each fetcher of the first node as soon as it is there."""
    ended, node = threading.Event(), psutil.Process(scene.services[0].process.pid)

    def hang() -> None:
        while not ended.wait(0.2):
            for child in node.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "fetcher" in f"{child.name()} {' '.join(child.cmdline())}":
                        child.suspend()

    thread = threading.Thread(target=hang)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()
        for child in node.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.resume()

    return end


WAITS_FETCH = frozenset({"TrainerWaits fetch"})
FAULTS = {
    "slow store": Fault(
        _mood(Mood.SLOW),
        "histogram_quantile(0.5, sum by (le) (rate(dataplane_store_request_seconds_bucket[10s]))) > 0.1",
        "fetch", "storage", WAITS_FETCH, service="wait for storage",
    ),
    "throttling": Fault(
        _mood(Mood.WELL, *[Mood.SLOW_DOWN] * 3),
        'sum(rate(dataplane_store_errors_total{error="StoreThrottled"}[10s])) > 0.1',
        "fetch", "storage", WAITS_FETCH | {"StoreThrottles"}, service="wait for storage",
    ),
    "slow map": Fault(
        _nothing,
        'sum(rate(dataplane_stage_seconds_sum{stage="decode"}[10s])) > 0.1',
        "decode",
        "decode",
        frozenset({"TrainerWaits decode"}),
        frozenset({"TrainerWaits queue"}),  # for the only worker, which maps
        map="user_functions:pauses",
        step_s=0.0,
        has_run=False,
        service="wait for decode",
    ),
    "slow trainer": Fault(
        _nothing,
        "min(dataplane_steps_ahead) > 1 and max(sum by (rank) "
        "(rate(dataplane_exposed_seconds_total[10s]))) < 0.02 or vector(0) > 0",
        "", "consumer", frozenset(), step_s=0.4,
    ),
    "dead node": Fault(
        _kill_node, "max(dataplane_nodes) < 2", "", "consumer", frozenset({"NodeGone"}),
        frozenset({"TrainerStands", "RanksMissing"}), step_s=0.4, has_run=False,
        service="was last seen",
    ),
    "hung fetcher": Fault(
        _hang_fetchers,
        'max(increase(dataplane_process_deaths_total{kind="fetcher"}[30s])) > 0',
        "fetch", "storage", frozenset({"ProcessesDie fetcher"}),
        WAITS_FETCH | {"TrainerStuck fetch", "TrainerStands", "TrainerWaits other"}, has_run=False, faster=10,
        service="no byte came",
    ),
}  # fmt: skip


# -- the service -----------------------------------------------------------------------------------


def _objects() -> dict[str, bytes]:
    draws = np.random.default_rng(0)
    objects = {}
    for shard in range(8):
        rows = [draws.bytes(ROW_BYTES) for _ in range(ROWS)]
        sink = pa.BufferOutputStream()
        table = pa.table({"x": pa.array(rows, pa.binary(ROW_BYTES))})
        pq.write_table(table, sink, row_group_size=GROUP, compression="NONE")
        objects[f"bucket/{shard}.parquet"] = sink.getvalue().to_pybytes()
    return objects


@contextlib.contextmanager
def scene(folder: Path, fault: Fault) -> Iterator[Scene]:
    """Two nodes, two ranks, and a Prometheus, with no fault yet."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(awry_server(_objects()))
        environ = store.environment() | {
            "DATAPLANE_TOKEN": TOKEN, "DATAPLANE_METRICS_LISTEN": "127.0.0.1:0",
            "DATAPLANE_STATE_DIR": str(folder / "state"), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parent),
        }  # fmt: skip
        os.environ.update(store.environment())
        names = [f"faults-{os.getpid()}-{time.monotonic_ns()}:{number}" for number in (1, 2)]
        services: list[Service] = []
        for number, name in enumerate(names):
            own = environ | {"DATAPLANE_CACHE_DIR": str(folder / f"cache-{number}")}
            of = (
                ("--node", "--join", services[0].address) if number else ("--listen", "127.0.0.1:0")
            )
            service = Service(
                *of, "--service", name, *SMALL, environ=own, log=folder / f"{number}.log"
            )
            services.append(stack.enter_context(service))
        for rank, name in enumerate(names):
            command = [
                sys.executable,
                __file__,
                "--train",
                name,
                str(rank),
                str(fault.step_s),
                fault.map,
            ]
            log = stack.enter_context((folder / f"rank-{rank}.log").open("wb"))
            own = {**os.environ, **environ, "TORCHELASTIC_RUN_ID": "faults"}
            trainer = subprocess.Popen(command, env=own, stdout=log, stderr=log)
            stack.callback(trainer.wait)
            stack.callback(trainer.kill)
        targets = [scrapes.address_in(service) for service in services]
        prometheus = stack.enter_context(
            _observe().Prometheus(folder / "prometheus", targets, TOKEN, fault.faster)
        )
        yield Scene(store, services, prometheus)


def train(service: str, rank: int, step_s: float, map_name: str) -> None:
    """Be one of two ranks, until killed."""
    from dataplane_torch import DataLoader

    from dataplane.model.records import Topology

    place = Topology(rank, 2, rank, 2, rank, 2)
    with DataLoader(
        "s3://bucket/",
        4,
        service=service,
        topology=place,
        name="faults",
        window=GROUP,
        lanes=1,
        map=map_name or None,
    ) as loader:
        while True:
            for _ in loader:
                _pause.wait(step_s)


# -- the table -------------------------------------------------------------------------------------


def doctored(fault: Fault) -> str:
    """Return the stage that bounds a run on this machine, by `dataplane doctor`."""
    command = [*DATAPLANE, "doctor", "s3://bucket/", "--json", "--seconds", "6", "--batch-size", "4",
               "--step-ms", str(fault.step_s * 1e3), *SMALL[:8]]  # fmt: skip
    done = subprocess.run(command, capture_output=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr.decode()
    return str(json.loads(done.stdout)["bound"]["stage"])


def service_checked(scene: Scene) -> set[str]:
    """Return what is wrong with the service, by `dataplane doctor --join`."""
    command = [
        *DATAPLANE,
        "doctor",
        "--join",
        scene.services[0].address,
        "--seconds",
        "5",
        "--json",
    ]
    environ = os.environ | {"DATAPLANE_TOKEN": TOKEN}
    done = subprocess.run(command, capture_output=True, check=False, env=environ)
    checks = json.loads(done.stdout)["checks"]
    return {check["found"] for check in checks if check["advice"]}


def photographed(prometheus: Any, path: Path) -> None:
    """Write a picture of Prometheus' graph of exposed time."""
    of = {"g0.expr": GRAPH, "g0.tab": 0, "g0.stacked": 0, "g0.range_input": "3m"}
    with LivePage(f"{prometheus.url}/graph?{urllib.parse.urlencode(of)}", 1000, 900) as page:
        page.until("document.querySelector('svg path')")
        _pause.wait(3.0)  # the legend follows
        page.screenshot(path)


def tried(name: str, folder: Path, picture: Path | None = None) -> tuple[str, ...]:
    """Inject a fault; return a row of the table, whose last cell is "" if all is named rightly."""
    fault = FAULTS[name]
    with scene(folder, fault) as at:
        wait(lambda: at.value("count(dataplane_samples_total > 100)") == len(at.services), folder)
        end = fault.inject(at)
        try:
            began, wrong = time.monotonic(), {"nothing yet"}
            seen, alerts, said = None, set[str](), {"nothing yet"}
            while wrong and time.monotonic() < began + SHOWN_S:
                _pause.wait(1.0)
                alerts |= at.alerts()
                now = at.value(fault.metric) > 0, at.exposed(), at.bounds().get(0, ""), alerts
                missed = _wrong(fault, *now)
                if seen is None or len(missed) < len(_wrong(fault, *seen)):
                    seen = now
                if not _is_named(fault.service, said):
                    said = service_checked(at)
                wrong = missed if "nothing yet" in wrong else wrong & missed
                wrong |= set() if _is_named(fault.service, said) else {"doctor --join"}
            if picture is not None and name == "slow store":
                photographed(at.prometheus, picture)
            assert seen is not None
            took = time.monotonic() - began
            doctor = doctored(fault) if fault.has_run else ""
            if fault.has_run and doctor != fault.bound:
                wrong.add("doctor")
            doctor = "; ".join(filter(None, (doctor, *sorted(said))))
        finally:
            end()
    named, (stage, share), bound, _ = seen
    return (name, "yes" if named else "no", f"{stage} {share:.0%}", bound, doctor,
            ", ".join(sorted(alerts)) or "-", f"{took:.0f} s", ", ".join(sorted(wrong)))  # fmt: skip


def _is_named(words: str, said: set[str]) -> bool:
    return any(words in text for text in said) if words else not said


def _wrong(
    fault: Fault, named: bool, exposed: tuple[str, float], bound: str, alerts: set[str]
) -> set[str]:
    stage, share = exposed
    checks = {
        "metric": named,
        "exposed": stage == fault.stage if fault.stage else share < 0.1,
        "status": bound == fault.bound,
        "alerts": fault.alerts <= alerts <= fault.alerts | fault.may,
    }
    return {what for what, is_right in checks.items() if not is_right}


def wait(is_so: Callable[[], object], folder: Path) -> None:
    """Wait until ranks have begun."""
    deadline = time.monotonic() + 120
    while not is_so():
        logs = [path.read_text() for path in folder.glob("*.log")]
        assert time.monotonic() < deadline, "\n".join(logs)
        _pause.wait(0.2)


def main(names: list[str]) -> int:
    """Print the table."""
    rows = [("fault", "metric", "exposed", "status", "doctor", "alerts", "after", "wrong")]
    picture = Path(names.pop(1)) if names[:1] == ["--picture"] else None
    for name in names[picture is not None :] or FAULTS:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            rows.append(tried(name, Path(folder), picture))
        sys.stderr.write(f"{rows[-1]}\n")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    return int(any(row[-1] for row in rows[1:]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
    sys.exit(main(sys.argv[1:]))
