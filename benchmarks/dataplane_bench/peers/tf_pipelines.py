"""Endless tf.data pipelines: an epoch is a fixed count of their batches.

Imported where TensorFlow is; see tf_data.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from dataplane_bench.model import CROP, ColumnType, TrialTask, Workload, WorkloadColumn
from dataplane_bench.peers import memmaps
from dataplane_bench.peers.base import SHUFFLE_BUFFER, Batch
from dataplane_bench.peers.samples import RATIO, SCALE

_ENDLESS = 1 << 40
_CYCLE = 8
_ATTEMPTS = 10
_JOB = "bench"
_READ_BYTES = 1 << 20


class TfPipeline:
    """One iterator over an endless pipeline, so that nothing ends between epochs."""

    def __init__(self, task: TrialTask) -> None:
        workload = task.workload
        self._folder = task.cache
        self._matrices = [dense for dense in memmaps.dense_files(workload) if dense.is_matrix]
        self._texts = [column.name for column in workload.of_kind(ColumnType.STRING)]
        parallel = task.settings["parallel"]
        calls = tf.data.AUTOTUNE if parallel == "AUTOTUNE" else parallel
        if workload.of_kind(ColumnType.IMAGE):
            endless, count = _records(task, calls)
            self._matrices = []
        else:
            count = len(range(task.rank, workload.sample_count, task.size))
            is_served = task.service and task.settings.get("service")
            endless = _streamed(task, calls) if is_served else _gathered(task, calls)
        self._length = -(-count // workload.batch_size)
        if task.service and task.settings.get("service"):
            endless = _shared(endless, task)
        options = tf.data.Options()
        if not workload.of_kind(ColumnType.IMAGE):
            # They write the pipeline anew, with a copy of every tensor in it, and find nothing.
            # A deterministic = False would do so too, and could mix an epoch with the next.
            options.experimental_optimization.apply_default_optimizations = False
        if isinstance(parallel, int):
            options.threading.private_threadpool_size = parallel
        self._iterator = iter(endless.prefetch(tf.data.AUTOTUNE).with_options(options))
        self._done = 0

    def epoch(self, number: int) -> Iterator[Batch]:
        """The next epoch: the pipeline numbers epochs itself."""
        self._done = number * self._length
        return self._rest()

    def state(self) -> Any:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            tf.train.Checkpoint(iterator=self._iterator).write(f"{folder}/state")
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        return {"files": files, "done": self._done}

    def resume(self, state: Any) -> Iterator[Batch]:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            for name, content in state["files"].items():
                (Path(folder) / name).write_bytes(content)
            checkpoint = tf.train.Checkpoint(iterator=self._iterator)
            checkpoint.read(f"{folder}/state").assert_consumed()
        self._done = state["done"]
        return self._rest()

    def _rest(self) -> Iterator[Batch]:
        for _ in range(self._length - self._done % self._length):
            # Count before yielding: the consumer may ask for the state as soon as it has the batch.
            self._done += 1
            yield self._batch(next(self._iterator))

    def _batch(self, tensors: Mapping[str, Any]) -> Batch:
        batch: dict[str, Any] = {
            name: [text.decode() for text in value.numpy()]
            if value.dtype == tf.string
            else from_dlpack(value)
            for name, value in tensors.items()
        }
        for name in self._texts:
            if f"{name}.ends" in batch:
                whole, ends = batch[name].numpy().tobytes(), batch.pop(f"{name}.ends").tolist()
                starts = [0, *ends[:-1]]
                batch[name] = [
                    whole[start:end].decode() for start, end in zip(starts, ends, strict=True)
                ]
        return memmaps.unpacked(self._matrices, batch)

    def close(self) -> None:
        self._iterator = None


class TfDataService:
    """A dispatcher and a worker of tf.data's service, in this process."""

    def __init__(self) -> None:
        service = tf.data.experimental.service
        self._dispatcher = service.DispatchServer()
        self.address = self._dispatcher.target
        address = self.address.partition("://")[2]
        self._worker: Any = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))

    def close(self) -> None:
        for server in (self._worker, self._dispatcher):
            # There is no public way to end one except to drop all references.
            server._stop()  # noqa: SLF001


def _gathered(task: TrialTask, calls: int) -> Any:
    """Batches by their numbers, which count on from epoch to epoch.

    The tensors are the mapped files themselves, through DLPack: nothing is read before it is asked
    for, and the ranks and jobs of a host share the page cache.
    """
    workload, size = task.workload, task.workload.batch_size
    rows = memmaps.mapped(workload, task.place.folder, np.random.default_rng())
    tables = {name: _tensor(dense) for name, dense in rows.dense.items()}
    lists = {
        name: (_tensor(torch.from_numpy(values)), _tensor(torch.from_numpy(offsets)))
        for name, (values, offsets) in rows.lists.items()
    }
    mine = len(range(task.rank, workload.sample_count, task.size))
    length = -(-mine // size)

    def batch(number: Any) -> dict[str, Any]:
        first = number % length * size
        places = tf.range(first, tf.minimum(first + size, mine)) * task.size + task.rank
        seed = tf.stack([tf.constant(task.seed, tf.int64), number // length])
        ids = tf.random.experimental.index_shuffle(places, seed, workload.sample_count - 1)
        tensors = {name: tf.gather(table, ids) for name, table in tables.items()}
        for column in memmaps.listed(workload):
            values, offsets = lists[column.name]
            ragged = tf.RaggedTensor.from_row_splits(values, offsets, validate=False)
            part = tf.gather(ragged, ids)
            tensors |= _padded(column, part)
        return tensors

    numbers = tf.data.Dataset.range(_ENDLESS)
    return numbers.map(batch, num_parallel_calls=calls)


def _padded(column: WorkloadColumn, part: Any) -> dict[str, Any]:
    """A ragged batch as a trainer wants it; texts as their bytes and where each ends."""
    if column.kind is ColumnType.STRING:
        return {column.name: part.flat_values, f"{column.name}.ends": part.row_splits[1:]}
    return {column.name: part.to_tensor(), f"{column.name}.length": part.row_lengths()}


def _tensor(tensor: torch.Tensor) -> Any:
    """The same memory."""
    return tf.experimental.dlpack.from_dlpack(to_dlpack(tensor))


def _streamed(task: TrialTask, calls: int) -> Any:
    """The same rows as records of fixed length: a mapped tensor does not travel to the service."""
    dense = memmaps.dense_files(task.workload)

    def batch(records: Mapping[str, Any]) -> dict[str, Any]:
        return {
            file.file: tf.reshape(
                tf.io.decode_raw(records[file.file], file.dtype), [-1, *file.shape]
            )
            for file in dense
        }

    files = {
        file.file: tf.data.FixedLengthRecordDataset(
            str(task.place.folder / file.file), file.row_bytes, buffer_size=_READ_BYTES
        )
        for file in dense
    }
    mixed = tf.data.Dataset.zip(files).shuffle(SHUFFLE_BUFFER)
    return mixed.batch(task.workload.batch_size).map(batch, num_parallel_calls=calls).repeat()


def _shared(endless: Any, task: TrialTask) -> Any:
    """The same, from the service's cache: a late job starts at the cached batches."""
    service = tf.data.experimental.service
    return endless.apply(
        service.distribute(
            processing_mode=service.ShardingPolicy.OFF,
            service=task.service,
            job_name=_JOB,
            compression=None,
            cross_trainer_cache=service.CrossTrainerCache(trainer_id=task.run),
        )
    )


def _records(task: TrialTask, calls: int) -> tuple[Any, int]:
    """Samples of this rank's TFRecord files, and how many there are."""
    files = sorted(task.place.folder.glob("*.tfrecord"))[task.rank :: task.size]
    parse = _parser(task.workload)
    names = tf.data.Dataset.from_tensor_slices([str(file) for file in files])
    mixed = names.shuffle(len(files)).interleave(
        tf.data.TFRecordDataset,
        cycle_length=min(_CYCLE, len(files)),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=False,
    )
    # A number for each crop: without random operations of its own a pipeline can be saved.
    seeds = tf.data.Dataset.random(rerandomize_each_iteration=True)
    samples = tf.data.Dataset.zip((mixed.shuffle(SHUFFLE_BUFFER), seeds))
    crops = samples.map(parse, num_parallel_calls=calls, deterministic=False)
    batches = crops.padded_batch(task.workload.batch_size).repeat()
    return batches, sum(int(file.stem.rpartition("-")[2]) for file in files)


def _parser(workload: Workload) -> Callable[[Any], dict[str, Any]]:
    """A record to a sample."""
    features = {column.name: tf.io.FixedLenFeature([], tf.string) for column in workload.columns}

    def parse(record: Any, seed: Any) -> dict[str, Any]:
        encoded = tf.io.parse_single_example(record, features)
        sample = {}
        for column in workload.columns:
            value = encoded[column.name]
            match column.kind:
                case ColumnType.IMAGE:
                    sample[column.name] = _crop(value, tf.stack([seed, 0]))
                case ColumnType.STRING:
                    sample[column.name] = value
                case ColumnType.RAGGED:
                    values = tf.io.decode_raw(value, column.dtype)
                    sample |= {
                        column.name: values,
                        f"{column.name}.length": tf.size(values, tf.int64),
                    }
                case ColumnType.FIXED:
                    values = tf.io.decode_raw(value, column.dtype)
                    sample[column.name] = tf.reshape(values, column.shape)
        return sample

    return tf.autograph.experimental.do_not_convert(parse)  # type: ignore[no-any-return]


def _crop(encoded: Any, seed: Any) -> Any:
    """Decodes only what the crop needs.   Shapes:  result: uint8[CROP, CROP, 3]."""
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(encoded),
        tf.zeros([1, 0, 4]),
        seed,
        min_object_covered=0.0,
        aspect_ratio_range=RATIO,
        area_range=SCALE,
        max_attempts=_ATTEMPTS,
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.concat([begin[:2], size[:2]], 0)
    part = tf.image.decode_and_crop_jpeg(encoded, window, channels=3)
    resized = tf.image.resize(part, [CROP, CROP])
    return tf.image.stateless_random_flip_left_right(tf.cast(resized + 0.5, tf.uint8), seed)
