"""Open a loader: a job over urls, or passes over a torch Dataset.

Modules for only one of the two are imported when it is opened. Modules for a job are imported once
its node has been started, since a node takes longer to start than these imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dataplane import collector
from dataplane.errors import ConfigError
from dataplane_torch.arguments import Arguments, job_of

if TYPE_CHECKING:
    from dataplane_torch.device import Given, Target
    from dataplane_torch.loader import DataLoader
    from dataplane_torch.local.local_pass import LocalPass
    from dataplane_torch.local.progress import PassState
    from dataplane_torch.local.worker_pass import WorkerPass
    from dataplane_torch.shards import UrlJob


def open_job(given: Arguments, target: Target | None, *, pin_memory: bool) -> UrlJob:
    """The job over urls. Its node is started, if this process has none yet, and begins to open the
    dataset; nobody waits for it before the first use.

    Raises:  as `job_of`, and `JobToOpen.check_files`.
    """
    job = job_of(given)
    begun = job.begin()
    try:
        job.check_files()
        with collector.resting():  # as in dataplane_torch/__init__.py
            from dataplane_torch.pinning import cuda_pinning
            from dataplane_torch.shards import UrlJob

        return UrlJob(
            job,
            begun,
            dataset_moved=given.options["dataset_moved"],
            pinning=cuda_pinning(wanted=pin_memory),
            target=target,
        )
    except BaseException:
        if begun is not None:
            begun.close()
        raise


def new_pass(
    loader: DataLoader[Any],
    resume: PassState | None,
    loaded_in: dict[str, int],
    target: Target | None,
) -> LocalPass | WorkerPass:
    """A pass over a torch Dataset: in this process, or in workers."""
    if loader.num_workers == 0:
        from dataplane_torch.local.local_pass import LocalPass

        return LocalPass(loader, resume, loaded_in, target)
    from dataplane_torch.local.worker_pass import WorkerPass

    return WorkerPass(loader, resume, loaded_in, target)


def make_epoch_settable(sampler: object) -> None:
    """Call `sampling.make_epoch_settable`, imported late."""
    from dataplane_torch.local import sampling

    sampling.make_epoch_settable(sampler)


def target_of(device: Given) -> Target | None:
    """Where the batches go, if not to host memory.

    Raises:  ConfigError: there is no such device.
    """
    if device is None:
        return None
    from dataplane_torch.device import find_target

    return find_target(device)


def refuse_neither(dataset: object) -> None:
    """Raises:  ConfigError: it is neither a torch Dataset nor a url."""
    needs = ("__getitem__", "__getitems__", "__iter__")
    if not any(hasattr(dataset, need) for need in needs):
        raise ConfigError(
            f"{dataset!r:.80} is neither a torch Dataset nor a url: pass something with "
            "__getitem__ and __len__, an IterableDataset, or the urls of shards",
            field="dataset",
        )
