"""A mixture under DDP, in real processes as torchrun starts them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from dataplane_torch import DataLoader
from launching import launch
from warm import WarmPython
from weighted import (
    BATCH,
    FIRST,
    OPTIONS,
    SECOND,
    Rows,
    counts_of,
    joined,
    mixed,
    rows_of,
    saved,
    write_sources,
)

RANK = Path(__file__).parent / "on_mixtures.py"
LENGTH, ROUND, SET_AT, SAVED_AT, KILLED_AT = 3072, 1024, 5, 12, 15
EDITED = {"web": 0.5, "code": 0.0, "math": 0.5}
ONE_LANE: dict[str, Any] = {**OPTIONS, "lanes": 1}


def test_a_mixture_under_ddp_is_that_of_one_process_after_a_kill_on_other_ranks(
    tmp_path: Path, small_node: None, warm_torch: WarmPython
) -> None:
    folder, out = write_sources(tmp_path), tmp_path / "out"

    def ranks(phase: str, size: int, **more: Any) -> tuple[list[int], Rows]:
        """The exit statuses of all ranks, and their global batches."""
        given = {
            "phase": phase, "out": str(out), "folder": str(folder), "length": LENGTH,
            "options": ONE_LANE, "weights": FIRST, "state": None, "set_at": 0, "set_to": SECOND,
            "saved_at": 0, "killed_at": 0,
        }  # fmt: skip
        done = launch(warm_torch, RANK, out, json.dumps({**given, **more}), size=size)
        files = sorted(out.glob(f"{phase}-*.jsonl"))
        passes = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        return done, joined(passes)

    times = {"set_at": SET_AT, "saved_at": SAVED_AT, "killed_at": KILLED_AT}
    killed, first = ranks("first", 2, **times)
    assert killed == [-signal.SIGKILL] * 2, (out / "errors").read_text()
    states = [json.loads((out / f"state-{rank}.json").read_text()) for rank in range(2)]
    assert states[0] == states[1]
    done, rest = ranks("rest", 4, state=states[0], weights=EDITED)
    assert done == [0] * 4, (out / "errors").read_text()

    whole = []
    with DataLoader(mixed(folder, length=LENGTH), **ONE_LANE) as loader:
        for batch in loader:
            whole.append(batch["id"].tolist())
            if len(whole) == SET_AT:
                loader.set_weights(SECOND)
            if len(whole) == SAVED_AT:
                state = saved(loader)
    with DataLoader(mixed(folder, EDITED, length=LENGTH), **ONE_LANE) as loader:
        loader.load_state_dict(state)
        assert rows_of(loader) == rest
    assert states[0] == state
    assert first == whole[:KILLED_AT]
    # The weights that were set, and then those of the edited mixture.
    changed, edited = ROUND // BATCH, 2 * ROUND // BATCH - SAVED_AT
    assert counts_of(whole[:changed])[1] < counts_of(whole[changed + 1 : 2 * changed])[1]
    assert rest[:edited] == whole[SAVED_AT : SAVED_AT + edited]
    assert counts_of(rest[edited + 1 :])[1] == 0
