"""Ray Data: tasks of a Ray cluster read Parquet, the trainer's process shuffles and collates."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataplane_bench.model import (
    CROP,
    BenchCase,
    ColumnType,
    Settings,
    StorageKind,
    TrialTask,
    Workload,
    WorkloadColumn,
)
from dataplane_bench.peers.base import SHUFFLE_BUFFER, Batch
from dataplane_bench.peers.samples import padded, random_resized_crop_flip

FILE_COUNT = 32
"""Or more: a file is what a task reads, and what is shuffled first."""
FILE_BYTES = 64 << 20
"""Or less."""
_CROPS_AT_ONCE = 32
_LINKS = "bench-ray-"
_CLOSE_TIMEOUT_S = 10.0


class RayData:
    """`ray.data.read_parquet(shuffle="files").iter_torch_batches(local_shuffle_buffer_size=...)`"""

    name = "ray"
    title = "Ray Data"
    requirements: tuple[str, ...] = ("ray[data,train]",)
    distribution = "ray"

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        return "its ranks are workers of one Ray Train job" if case.ranks > 1 else ""

    def layout(self, workload: Workload) -> str:
        return "ray"

    def describe(self, workload: Workload) -> str:
        return (
            "Parquet without compression, wide rows as bytes; files in random order, then a"
            f" shuffle buffer of {SHUFFLE_BUFFER:,} samples"
        )

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        # The newer Parquet reader, its default, starts processes for the files' footers in each
        # epoch. What fits into the cluster's memory is best kept there, says its documentation.
        default: Settings = {"datasource": "v2", "prefetch_batches": 1}
        ahead: Settings = {"datasource": "v1", "prefetch_batches": 4}
        if workload.shape == "images":
            return (
                {**default, "decode": "map_batches"},
                {**ahead, "decode": "map_batches"},
                {**ahead, "decode": "collate_fn"},
            )
        if case.store is StorageKind.S3:
            return (default, ahead, {**ahead, "read_cpus": 0.25})
        return (default, ahead, {**ahead, "materialize": True})

    def prepare(self, workload: Workload, folder: Path) -> None:
        shards = workload.shards
        for shard in shards:
            table = pq.read_table(shard, columns=[column.name for column in workload.columns])
            count = max(math.ceil(FILE_COUNT / len(shards)), math.ceil(table.nbytes / FILE_BYTES))
            rows = math.ceil(table.num_rows / count)
            for index, start in enumerate(range(0, table.num_rows, rows)):
                pq.write_table(
                    _stored(workload, table.slice(start, rows)),
                    folder / f"{shard.stem}-{index:03d}.parquet",
                    row_group_size=rows,
                    compression="NONE",
                    use_dictionary=False,
                )

    def open(self, task: TrialTask) -> _Opened:
        return _Opened(task)

    def serve(self, task: TrialTask) -> tuple[str, Any]:
        """A Ray cluster that was already running."""
        cluster = _Cluster(task.cache, "")
        return cluster.service, cluster


def _stored(workload: Workload, table: pa.Table) -> pa.Table:
    """Wide rows as bytes: Parquet reads nested lists at a fifth of the speed."""
    for index, column in enumerate(workload.columns):
        if column.kind is ColumnType.FIXED and column.shape:
            values = table.column(index).combine_chunks()
            count = len(values)
            while pa.types.is_fixed_size_list(values.type):
                values = values.flatten()
            content = pa.py_buffer(np.ascontiguousarray(values, dtype=column.dtype))
            binary = pa.binary(column.sample_bytes)
            array = pa.FixedSizeBinaryArray.from_buffers(binary, count, [None, content])
            table = table.set_column(index, column.name, array)
    return table


class _Cluster:
    """A Ray cluster of this machine, its files below `folder`, or one that was already running."""

    def __init__(self, folder: Path, service: str) -> None:
        address, _, token = service.partition(" ")
        os.environ |= {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
            # It listens beyond loopback; without this the token would lie in the user's home.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token or secrets.token_hex(32),
        }
        import ray

        self._ray = ray
        self._link: Path | None = None
        if service:
            own: dict[str, Any] = {"address": address}
        else:
            self._link = _short_name(folder / "ray")
            own = {
                "num_cpus": len(os.sched_getaffinity(0)),
                "include_dashboard": False,
                "_temp_dir": str(self._link),
            }
        context = ray.init(logging_level="ERROR", log_to_driver=False, **own)
        self.service = f"{context.address_info['gcs_address']} {os.environ['RAY_AUTH_TOKEN']}"

    def close(self) -> None:
        self._ray.shutdown()
        if self._link is not None:
            self._link.unlink(missing_ok=True)


def _short_name(folder: Path) -> Path:
    """A link to a new folder: Ray's sockets lie below, and their paths have at most 107 bytes."""
    folder.mkdir(exist_ok=True)
    for old in Path("/tmp").glob(f"{_LINKS}*"):
        with contextlib.suppress(OSError):
            if not old.exists():  # left by a process that was killed
                old.unlink()
    link = Path("/tmp") / f"{_LINKS}{secrets.token_hex(4)}"
    link.symlink_to(folder)
    return link


class _Opened:
    def __init__(self, task: TrialTask) -> None:
        self._task = task
        self._cluster = _Cluster(task.cache, task.service)
        import ray

        self._settings = dict(task.settings)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.use_datasource_v2 = self._settings["datasource"] == "v2"
        self._samples = self._read()
        self._pass: Any = None

    def _read(self) -> Any:
        import ray

        place = self._task.place
        names = [f"{place.url}/{file.name}" for file in sorted(place.folder.glob("*.parquet"))]
        system = None
        if place.endpoint:
            from pyarrow import fs

            scheme, _, host = place.endpoint.partition("://")
            system = fs.S3FileSystem(
                access_key=place.access_key,
                secret_key=place.secret_key,
                endpoint_override=host,
                scheme=scheme,
                region="us-east-1",
                tls_ca_file_path=place.authority or None,
            )
            names = [name.removeprefix("s3://") for name in names]
        samples = ray.data.read_parquet(
            names,
            filesystem=system,
            columns=[column.name for column in self._task.workload.columns],
            shuffle=ray.data.FileShuffleConfig(seed=self._task.seed),
            num_cpus=self._settings.get("read_cpus"),
            override_num_blocks=len(names),  # as many as files, else each file's block is split
        )
        if self._settings.get("materialize"):
            samples = samples.materialize()
        if self._settings.get("decode") == "map_batches":
            samples = samples.map_batches(
                _crops,
                batch_format="pyarrow",
                batch_size=_CROPS_AT_ONCE,
                fn_args=(tuple(c.name for c in self._task.workload.of_kind(ColumnType.IMAGE)),),
            )
        return samples

    def epoch(self, number: int) -> Iterator[Batch]:
        samples = self._samples
        if self._settings.get("materialize"):
            samples = samples.randomize_block_order(seed=self._task.seed + number)
        batches = samples.iter_torch_batches(
            batch_size=self._task.workload.batch_size,
            prefetch_batches=self._settings["prefetch_batches"],
            local_shuffle_buffer_size=SHUFFLE_BUFFER,
            local_shuffle_seed=self._task.seed + number,
            collate_fn=_collate(self._task.workload),
        )
        opened: Iterator[Batch] = iter(batches)
        self._pass = opened
        return opened

    def close(self) -> None:
        if self._pass is not None:
            self._pass.close()
            self._pass = None
            gc.collect()
        # Ray ends the whole process where a thread still asks for a block of an ended cluster.
        for thread in threading.enumerate():
            if thread.name == "iter_threaded":
                thread.join(_CLOSE_TIMEOUT_S)
        self._cluster.close()


def _crops(table: pa.Table, names: tuple[str, ...]) -> pa.Table:
    from ray.data.extensions import ArrowTensorArray

    for name in names:
        crops = ArrowTensorArray.from_numpy(_cropped(table.column(name)))
        table = table.set_column(table.schema.get_field_index(name), name, crops)
    return table


def _cropped(values: pa.Array | pa.ChunkedArray) -> NDArray[np.uint8]:
    """Shapes:  result: uint8[n, CROP, CROP, 3]."""
    random = np.random.default_rng()
    crops = np.empty((len(values), CROP, CROP, 3), np.uint8)
    for index, image in enumerate(values):
        encoded = np.frombuffer(image.as_buffer(), np.uint8)
        crops[index] = random_resized_crop_flip(encoded, random)
    return crops


def _collate(workload: Workload) -> Any:
    """Makes tensors of an Arrow table; Ray requires a subclass of its own class."""
    from ray.data.collate_fn import ArrowBatchCollateFn

    class Collate(ArrowBatchCollateFn):  # type: ignore[misc]
        def __call__(self, table: pa.Table) -> Batch:
            batch: dict[str, Any] = {}
            for column in workload.columns:
                values = table.column(column.name).combine_chunks()
                batch |= _tensors(column, values)
            return batch

    return Collate()


def _tensors(column: WorkloadColumn, values: pa.Array) -> dict[str, Any]:
    import torch

    name = column.name
    match column.kind:
        case ColumnType.FIXED if column.shape:
            width = column.sample_bytes
            content = values.buffers()[1].slice(values.offset * width, len(values) * width)
            array = np.frombuffer(content, column.dtype).reshape(-1, *column.shape)
            return {name: torch.from_numpy(array.copy())}  # Arrow's own is read-only
        case ColumnType.FIXED:
            return {name: torch.from_numpy(np.array(values, column.dtype))}
        case ColumnType.RAGGED:
            flat = np.asarray(values.flatten())
            bounds = np.asarray(values.offsets) - values.offsets[0].as_py()
            tensor, lengths = padded(np.split(flat, bounds[1:-1]))
            return {name: tensor, f"{name}.length": lengths}
        case ColumnType.STRING:
            return {name: values.to_pylist()}
        case ColumnType.IMAGE:
            if isinstance(values, pa.ExtensionArray):
                return {name: torch.from_numpy(values.to_numpy_ndarray().copy())}
            return {name: torch.from_numpy(_cropped(values))}
