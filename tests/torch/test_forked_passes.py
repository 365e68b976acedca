"""A pass over urls belongs to the process that began it; a forked child may begin another."""

from __future__ import annotations

import pytest
from dataplane_torch import DataLoader, ShardedIterableDataset
from forked import forking

from dataplane.model.errors import ConfigError

URL = "s3://bucket/shards/*.parquet"


def positions(batches) -> list[int]:
    return [t for batch in batches for t in batch["t"].tolist()]


@pytest.mark.parametrize("taken", [0, 2])
def test_a_forked_child_reads_its_own_batches_and_none_of_its_parents(fake, taken) -> None:
    fake(sample_count=40)
    with DataLoader(URL, batch_size=4) as loader:
        iterator = iter(loader)
        first = [next(iterator) for _ in range(taken)]

        def goes_on() -> int:
            for _ in range(2):
                with pytest.raises(ConfigError, match=r"begun by process \d+.*iter\(\)"):
                    next(iterator)
            return int(positions(loader) != list(range(40)))

        with forking(goes_on) as child:
            assert child.ask() == 0
        assert positions([*first, *iterator]) == list(range(40))


def test_a_forked_child_cannot_continue_a_pass_of_a_dataset_for_torchs_loader(fake) -> None:
    fake(sample_count=40)
    dataset = ShardedIterableDataset(URL, batch_size=4)
    iterator = iter(dataset)
    first = next(iterator)

    def goes_on() -> int:
        with pytest.raises(ConfigError, match="begun by process"):
            next(iterator)
        return 0

    with forking(goes_on) as child:
        assert child.ask() == 0
    assert positions([first, *iterator]) == list(range(40))
    dataset.close()
