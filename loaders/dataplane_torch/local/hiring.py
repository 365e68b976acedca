"""The workers that a pass over a user's Dataset starts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _sharding_worker_init_fn

from dataplane_torch.local.crew import Crew
from dataplane_torch.local.worker import Setup
from dataplane_torch.pinning import cuda_pinning


def hire(worker_pass: Any, loader: Any) -> Crew:
    """Start the workers of a pass, which has torch's attributes by now."""
    init_fn = loader.worker_init_fn
    if isinstance(worker_pass._dataset, IterDataPipe | MapDataPipe):
        settings = (init_fn, worker_pass._world_size, worker_pass._rank)
        init_fn = functools.partial(_sharding_worker_init_fn, *settings)
    pinning = (
        cuda_pinning(wanted=worker_pass._pin_memory)
        if loader._target is None
        else loader._target.pinning(reads_all=False)  # arrays, for one, stay with the user
    )
    is_iterable = worker_pass.beginning.place.is_iterable
    every = loader.snapshot_every_n_steps
    # A map-style dataset cannot skip what it does not know.
    state_every = -(-every // loader.num_workers) if is_iterable else 1

    def setup(worker_id: int, parent_pid: int) -> Setup:
        return Setup(
            kind=worker_pass._dataset_kind,
            dataset=worker_pass._dataset,
            auto_collation=worker_pass._auto_collation,
            collate_fn=worker_pass._collate_fn,
            drop_last=worker_pass._drop_last,
            batch_size=loader.batch_size or 1,
            base_seed=int(worker_pass._base_seed),
            init_fn=init_fn,
            worker_id=worker_id,
            worker_count=worker_pass._num_workers,
            shared_seed=worker_pass._shared_seed,
            is_pinned=pinning is not None,
            state_every=state_every,
            parent_pid=parent_pid,
        )

    context = loader.multiprocessing_context or torch.multiprocessing.get_context()
    return Crew(worker_pass._num_workers, context, setup, pinning)
