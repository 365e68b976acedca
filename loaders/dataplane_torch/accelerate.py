"""Use loaders with Accelerate, which otherwise rebuilds every loader as a torch DataLoader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard, prepare_data_loader

from dataplane.model.errors import ConfigError
from dataplane_torch.loader import DataLoader
from dataplane_torch.shards import Shards

EPOCH_KEY = "accelerate_epoch"
_OF_TORCH = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device"),
    "in_order",
)


def prepare(accelerator: Accelerator, loader: torch.utils.data.DataLoader[Any]) -> Any:
    """Prepare a loader like accelerator.prepare(loader), but keep dataplane's loader.

        model, optimizer = accelerator.prepare(model, optimizer)
        loader = prepare(accelerator, DataLoader(dataset, batch_size=32, shuffle=True))

    Over a Dataset, the Accelerator's settings divide the batches among the processes. Over urls,
    the loader already reads only the rows of its rank, and nothing is divided again. Batches are on
    the accelerator's device. One batch is read ahead, so that Accelerate sees the end of an epoch
    in time to step the optimizer. accelerator.save_state() saves the loader's position, and
    load_state() continues there without reading anything twice and restores the epoch (`for epoch
    in range(loader.iteration, 3)`). A torch loader, already prepared or not, is replaced by one of
    dataplane's: prepare(self.accelerator, super().get_train_dataloader()).

    Raises:  ConfigError: dispatch_batches=True, where one process reads for all.
    """
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, Shards):
        shell = {
            "batch_size": None,
            "device": accelerator.device if accelerator.device_placement else None,
            "_drop_last": loader.drop_last,
            "_non_blocking": accelerator.non_blocking,
        }
        return _registered(accelerator, _Prepared(loader.dataset, **shell), loader)
    # Check type() instead of isinstance(): Accelerate's loaders report the class of the loader that
    # they wrap.
    found: Any = loader
    if not issubclass(type(loader), DataLoaderShard):
        found = _shared_out(accelerator, loader)
    if type(found) is _Prepared:
        return found
    if type(found) is not DataLoaderShard:
        raise ConfigError(
            f"Accelerate wraps this loader in a {type(found).__name__}, but prepare() needs one "
            "that each process reads itself: pass dispatch_batches=False in the Accelerator's "
            "DataLoaderConfiguration",
            field="dispatch_batches",
        )
    prepared = _Prepared.__new__(_Prepared)
    prepared.__dict__.update(vars(found))
    given: dict[str, Any] = {}
    if issubclass(type(loader), DataLoader):
        given = {name: getattr(loader, name) for name in ("snapshot_every_n_steps", "device")}
    return _registered(accelerator, prepared, _as_ours(found.base_dataloader, given))


class _Prepared(DataLoaderShard):  # type: ignore[misc]
    """Accelerate's loader over a dataplane loader, whose state it saves."""

    _is_accelerate_prepared = True
    iteration: int

    def adopt(self, loader: DataLoader[Any]) -> None:
        """Read from `loader`."""
        self.base_dataloader, self.use_stateful_dataloader = loader, True
        # Over a Dataset, begin with an empty state, which means the start: `state_dict` would start
        # the workers.
        state = loader.state_dict() if isinstance(loader.dataset, Shards) else {}
        self.dl_state_dict = {**state, EPOCH_KEY: self.iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the next pass where the state was taken, in the state's epoch."""
        state = dict(state_dict)
        self.dl_state_dict = dict(state)
        self.iteration = state.pop(EPOCH_KEY)
        self.base_dataloader.load_state_dict(state)

    def _update_state_dict(self) -> None:
        """Replace Accelerate's method, which Accelerate calls before it reads a batch ahead."""
        epoch = self.iteration + bool(self.end_of_dataloader)
        self.dl_state_dict = {**self.base_dataloader.state_dict(), EPOCH_KEY: epoch}


def _shared_out(accelerator: Accelerator, loader: torch.utils.data.DataLoader[Any]) -> Any:
    """Make a loader like accelerator.prepare_data_loader(), but do not register it."""
    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        split_batches=accelerator.split_batches,
        put_on_device=accelerator.device_placement,
        rng_types=accelerator.rng_types.copy(),
        dispatch_batches=accelerator.dispatch_batches,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
        torch_device_mesh=accelerator.torch_device_mesh,
    )


def _as_ours(loader: torch.utils.data.DataLoader[Any], ours: Mapping[str, Any]) -> DataLoader[Any]:
    """Return a dataplane loader with the arguments of a torch loader, and `ours`, arguments that
    torch's loader lacks.
    """
    given: dict[str, Any] = {name: getattr(loader, name) for name in _OF_TORCH}
    if loader.batch_sampler is not None and loader.batch_size is None:
        given["batch_sampler"] = loader.batch_sampler
    else:
        given |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        is_iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
        given["sampler"] = None if is_iterable else loader.sampler
    return DataLoader(loader.dataset, **given, **ours)


def _registered(accelerator: Accelerator, prepared: _Prepared, loader: DataLoader[Any]) -> Any:
    prepared.adopt(loader)
    return accelerator.prepare_data_loader(prepared)
