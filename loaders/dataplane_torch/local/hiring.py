"""The workers that a pass over a user's Dataset starts."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe

from dataplane_torch.device import Target
from dataplane_torch.local.crew import Crew
from dataplane_torch.local.worker import Setup
from dataplane_torch.pinning import cuda_pinning
from dataplane_torch.torch_private.iteration import PassNames, is_iterable, sharding_init_fn


def hire(worker_pass: PassNames, loader: Any, target: Target | None) -> Crew:
    """Start the workers of a pass, which torch's constructor has made by now."""
    init_fn = loader.worker_init_fn
    if isinstance(worker_pass.dataset, IterDataPipe | MapDataPipe):
        init_fn = sharding_init_fn(init_fn, worker_pass.world_size, worker_pass.rank)
    pinning = (
        cuda_pinning(wanted=worker_pass.is_pinning)
        if target is None
        else target.pinning(reads_all=False)  # arrays, for one, stay with the user
    )
    of_iterable = is_iterable(loader)
    every = loader.snapshot_every_n_steps
    # A map-style dataset cannot skip batches, so its state is saved after each one.
    state_every = -(-every // loader.num_workers) if of_iterable else 1

    def setup(worker_id: int, parent_pid: int) -> Setup:
        return Setup(
            is_iterable=of_iterable,
            dataset=worker_pass.dataset,
            auto_collation=worker_pass.auto_collation,
            collate_fn=worker_pass.collate_fn,
            drop_last=worker_pass.drop_last,
            batch_size=loader.batch_size or 1,
            base_seed=int(worker_pass.base_seed),
            init_fn=init_fn,
            worker_id=worker_id,
            worker_count=worker_pass.worker_count,
            shared_seed=worker_pass.shared_seed,
            is_pinned=pinning is not None,
            state_every=state_every,
            parent_pid=parent_pid,
        )

    context = loader.multiprocessing_context or torch.multiprocessing.get_context()
    return Crew(worker_pass.worker_count, context, setup, pinning)
