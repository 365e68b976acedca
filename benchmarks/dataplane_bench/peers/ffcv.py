"""FFCV: one .beton file, mapped into memory; compiled threads copy, decode and crop."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

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
from dataplane_bench.peers.base import Batch
from dataplane_bench.peers.memmaps import Dense, MappedRows, dense_files, listed, mapped, write

_FILE = "samples.beton"
_PAGE_BYTES = 8 << 20
_LIBRARIES = ("opencv4", "libturbojpeg")
_CLOSE_TIMEOUT_S = 5.0


class Ffcv:
    """`ffcv.loader.Loader(..., order=OrderOption.RANDOM, os_cache=True)`"""

    name = "ffcv"
    title = "FFCV"
    # It needs Pillow and does not say so.
    requirements: tuple[str, ...] = ("ffcv>=1.0.2", "pillow")
    distribution = "ffcv"

    def lacks(self) -> str:
        """See base.Built."""
        missing = []
        if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
            missing.append("a C++ compiler")
        if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
            missing.append("Python.h")
        if shutil.which("pkg-config") is None:
            missing.append("pkg-config")
        else:
            is_installed = {
                name: subprocess.run(["pkg-config", "--exists", name], check=False).returncode == 0
                for name in _LIBRARIES
            }
            missing += [name for name in _LIBRARIES if not is_installed[name]]
        if not missing:
            return ""
        return (
            f"it needs {', '.join(missing)}. On Debian and Ubuntu:"
            " apt-get install g++ pkg-config libopencv-dev libturbojpeg0-dev python3-dev"
        )

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        return "it reads local files only" if case.store is StorageKind.S3 else ""

    def layout(self, workload: Workload) -> str:
        return "ffcv"

    def describe(self, workload: Workload) -> str:
        kept = ", JPEGs as they are" if workload.shape == "images" else ""
        return (
            f"one .beton file in the page cache{kept}; shuffled over the whole epoch;"
            " a batch lasts until the next one is taken"
        )

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        random: Settings = {"num_workers": cores, "order": "RANDOM", "os_cache": True}
        tried: tuple[Settings, ...] = (random, {**random, "batches_ahead": 8})
        if case.ranks == 1:  # not available for several ranks
            tried = (*tried, {**random, "order": "QUASI_RANDOM"})
        if cores > 1:
            tried = (*tried, {**random, "num_workers": max(cores // (2 * case.process_count), 1)})
        return tuple(choice for index, choice in enumerate(tried) if choice not in tried[:index])

    def prepare(self, workload: Workload, folder: Path) -> None:
        from ffcv.writer import DatasetWriter

        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            write(workload, Path(scratch))
            samples = _Samples(mapped(workload, Path(scratch), np.random.default_rng()))
            # A sample must fit into a page, else the writer waits for ever.
            page_bytes = max(_PAGE_BYTES, 1 << (2 * samples.largest - 1).bit_length())
            writer = DatasetWriter(str(folder / _FILE), _fields(workload), page_bytes)
            writer.from_indexed_dataset(samples)

    def open(self, task: TrialTask) -> _Opened:
        return _Opened(task)


def _names(workload: Workload) -> tuple[list[str], list[str]]:
    """Fields of the dense files and of the listed columns; a name has at most 16 characters."""
    dense = [f"dense{index}" for index, _ in enumerate(dense_files(workload))]
    return dense, [f"listed{index}" for index, _ in enumerate(listed(workload))]


def _is_single(dense: Dense) -> bool:
    """A number alone, of a dtype that FFCV has a field for; others stand in arrays."""
    return dense.is_matrix and dense.shape == (1,) and dense.dtype in ("int64", "float64")


def _fields(workload: Workload) -> dict[str, Any]:
    """In the order in which _Samples yields them."""
    from ffcv.fields import BytesField, FloatField, IntField, NDArrayField

    fields: dict[str, Any] = {}
    names, listed_names = _names(workload)
    for name, dense in zip(names, dense_files(workload), strict=True):
        if _is_single(dense):
            fields[name] = IntField() if dense.dtype == "int64" else FloatField()
        else:
            # Integers as wide: the compiler of its decoders does not know every dtype.
            width = np.dtype(dense.dtype).itemsize
            fields[name] = NDArrayField(np.dtype(f"int{8 * width}"), dense.shape)
    for name, column in zip(listed_names, listed(workload), strict=True):
        if column.kind is ColumnType.IMAGE:
            fields[name] = _jpeg_field()
        else:
            fields[f"{name}.size"] = IntField()
            fields[name] = BytesField()
    return fields


def _jpeg_field() -> Any:
    """A field of images that are JPEGs already; FFCV's own would decode and encode them anew."""
    import simplejpeg  # type: ignore[import-untyped]
    from ffcv.fields import RGBImageField
    from ffcv.fields.rgb_image import IMAGE_MODES

    class JpegField(RGBImageField):  # type: ignore[misc]
        def encode(self, destination: Any, encoded: bytes, malloc: Any) -> None:
            height, width, _, _ = simplejpeg.decode_jpeg_header(encoded)
            destination["mode"] = IMAGE_MODES["jpg"]
            destination["height"], destination["width"] = height, width
            destination["data_ptr"], storage = malloc(len(encoded))
            storage[:] = np.frombuffer(encoded, np.uint8)

    return JpegField("jpg")


class _Samples:
    """Samples as FFCV's writer wants them: by index, a tuple each."""

    def __init__(self, samples: MappedRows) -> None:
        self._dense, self._workload = samples.dense, samples.workload
        self._lists = samples.lists

    def __len__(self) -> int:
        return self._workload.sample_count

    @property
    def largest(self) -> int:
        """An upper bound for the bytes of the largest sample."""
        fixed = sum(dense.row_bytes for dense in dense_files(self._workload))
        return fixed + sum(
            int(np.diff(offsets).max(initial=1)) * values.itemsize
            for values, offsets in self._lists.values()
        )

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        sample: list[Any] = []
        for dense in dense_files(self._workload):
            row = self._dense[dense.file][index].numpy()
            sample.append(row[0] if _is_single(dense) else row)
        for column in listed(self._workload):
            values, offsets = self._lists[column.name]
            content = values[offsets[index] : offsets[index + 1]].view(np.uint8)
            if column.kind is not ColumnType.IMAGE:
                sample.append(len(content))
                # Without any bytes it would share its place in the file with the next.
                content = content if len(content) else np.zeros(1, np.uint8)
            sample.append(content)
        return tuple(sample)


class _Opened:
    def __init__(self, task: TrialTask) -> None:
        from ffcv.fields import RGBImageField
        from ffcv.fields.decoders import RandomResizedCropRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import RandomHorizontalFlip, ToTensor

        self._workload = task.workload
        self._share = len(range(task.rank, task.workload.sample_count, task.size))
        self._group = _joined(task) if task.size > 1 else None
        _, names = _names(task.workload)
        columns = zip(names, listed(task.workload), strict=True)
        images = [name for name, column in columns if column.kind is ColumnType.IMAGE]
        crop = [RandomResizedCropRGBImageDecoder((CROP, CROP)), RandomHorizontalFlip(), ToTensor()]
        self._loader: Any = Loader(
            str(task.place.folder / _FILE),
            task.workload.batch_size,
            pipelines=dict.fromkeys(images, crop),
            custom_fields=dict.fromkeys(images, RGBImageField),
            distributed=task.size > 1,
            seed=task.seed,
            drop_last=False,
            **{**task.settings, "order": OrderOption[task.settings["order"]]},
        )
        self._names = list(_fields(task.workload))
        self._pass: Any = None

    def epoch(self, number: int) -> Iterator[Batch]:
        self._loader.next_epoch = number
        self._pass = iter(self._loader)
        left = self._share
        for tensors in self._pass:
            batch = self._batch(dict(zip(self._names, tensors, strict=True)))
            size = len(next(iter(batch.values())))
            # torch's DistributedSampler repeats samples so that all ranks have equally many.
            yield batch if size <= left else {name: part[:left] for name, part in batch.items()}
            left -= size

    def close(self) -> None:
        if self._pass is not None:
            self._pass.close()
            self._pass.join(_CLOSE_TIMEOUT_S)
            self._pass = None
        if self._group is not None:
            self._group.destroy_process_group()
            self._group = None

    def _batch(self, tensors: dict[str, Any]) -> dict[str, Any]:
        import torch

        batch: dict[str, Any] = {}
        names, listed_names = _names(self._workload)
        for name, dense in zip(names, dense_files(self._workload), strict=True):
            values = tensors[name]
            if not _is_single(dense):
                values = values.view(getattr(torch, dense.dtype))
            parts = values.unbind(1) if dense.is_matrix else (values,)
            batch |= zip(dense.names, parts, strict=True)
        for name, column in zip(listed_names, listed(self._workload), strict=True):
            values = tensors[name]
            if column.kind is ColumnType.IMAGE:
                batch[column.name] = values
                continue
            sizes, rows = tensors[f"{name}.size"][:, 0].numpy(), values.numpy()
            if column.kind is ColumnType.STRING:
                pairs = zip(rows, sizes, strict=True)
                batch[column.name] = [row[:size].tobytes().decode() for row, size in pairs]
            else:
                batch |= _padded(column, rows, sizes)
        return batch


def _padded(column: WorkloadColumn, rows: Any, sizes: Any) -> dict[str, Any]:
    """Rows as wide as the longest of all samples, with old bytes behind each, as one batch.

    Shapes:  rows: uint8[B, longest].   sizes: int64[B], bytes.
    """
    import torch

    width = np.dtype(column.dtype).itemsize
    values = rows[:, : sizes.max()].view(column.dtype)
    lengths = sizes // width
    inside = np.arange(values.shape[1]) < lengths[:, None]
    whole = np.where(inside, values, np.zeros((), column.dtype))
    return {
        column.name: torch.from_numpy(whole),
        f"{column.name}.length": torch.from_numpy(lengths),
    }


def _joined(task: TrialTask) -> Any:
    """This rank in a process group, as in a trainer: FFCV asks it for rank and size."""
    from torch import distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here, whatever the host's name means
    store = f"file://{task.cache}/group-{task.run}"
    distributed.init_process_group("gloo", init_method=store, rank=task.rank, world_size=task.size)
    return distributed
