"""States that are taken in the body of an epoch's last step, over urls."""

from __future__ import annotations

import json

import pytest
from dataplane_torch import DataLoader

URL = "s3://bucket/shards/*.parquet"


@pytest.mark.parametrize(("count", "end", "steps"), [
    (32, "ragged", 4), (30, "ragged", 4), (30, "pad", 4), (30, "drop", 3), (3, "pad", 1),
])  # fmt: skip
def test_a_state_of_the_last_step_is_an_empty_pass_and_one_after_the_loop_is_not(
    fake, count, end, steps
) -> None:
    fake(sample_count=count)
    states = []
    for rank in range(2):
        place = {"global_batch_size": 8, "dp_rank": rank, "dp_size": 2, "name": "last", "end": end}
        with DataLoader(URL, **place) as loader:
            for _batch in loader:
                state = loader.state_dict()
            over = loader.state_dict()
            states.append(state)
            assert {**over, "in_last_step": True} == states[-1]
            assert (states[-1]["epoch"], states[-1]["cursor"]) == (1, 0)
        with DataLoader(URL, **place) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert loader.state_dict() == states[-1]
            assert loader.epoch == 0
            for epoch, left in ((0, 0), (1, steps), (2, steps)):
                assert [int(b["x"][0, 3]) for b in loader if len(b["x"])] == [epoch] * left
                assert loader.epoch == epoch + 1
                if not left:
                    assert loader.state_dict() == over
            loader.load_state_dict(over)
            assert [int(b["x"][0, 3]) for b in loader if len(b["x"])] == [1] * steps
            # A loop that counts epochs gets no sample twice, and only the requested epochs.
            for told, found in ((0, 0), (1, steps), (2, steps)):
                loader.load_state_dict(state)
                loader.set_epoch(told)
                assert len(list(loader)) == found
                assert loader.epoch == told + 1
    assert states[0] == states[1]


def test_an_empty_state_is_the_start(fake) -> None:
    fake(sample_count=20)
    with DataLoader(URL, batch_size=4) as loader:
        start = loader.state_dict()
        list(loader)
        next(iter(loader))
        loader.load_state_dict({})
        assert loader.state_dict() == start
        assert {int(batch["x"][0, 3]) for batch in loader} == {0}
