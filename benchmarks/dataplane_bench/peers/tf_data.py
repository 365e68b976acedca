"""tf.data: batches gathered from mapped tensors; images from TFRecord files.

Numbers and lists are tensors over mapped files, from which each batch is gathered in TensorFlow's
own threads, in the order of `index_shuffle`: a shuffle of the whole epoch, and twice as fast as
records of fixed length through a shuffle buffer, which pass through tf.data one by one. Batches
become torch tensors through DLPack, without a copy.

Source: https://www.tensorflow.org/guide/data_performance and the documentation of
tf.data.experimental.service, "CrossTrainerCache".
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataplane_bench.model import (
    BenchCase,
    ColumnType,
    Mode,
    Settings,
    StorageKind,
    TrialTask,
    Workload,
)
from dataplane_bench.peers import memmaps, rows, samples

if TYPE_CHECKING:
    from dataplane_bench.peers.tf_pipelines import TfPipeline

_FILES = 16


class TfData:
    """tf.data, and its service where several jobs share their batches."""

    name = "tf.data"
    title = "tf.data"
    requirements = ("tensorflow-cpu",)
    distribution = "tensorflow-cpu"

    def refuses(self, workload: Workload, case: BenchCase) -> str:
        if case.store is StorageKind.S3:
            return "it reads S3 only with tensorflow-io, which has none for this TensorFlow"
        if case.served and case.mode is Mode.FIRST:
            return "its daemon shares batches among jobs, and starts none of them faster"
        return ""

    def layout(self, workload: Workload) -> str:
        return "tfrecord" if workload.of_kind(ColumnType.IMAGE) else memmaps.LAYOUT

    def describe(self, workload: Workload) -> str:
        if workload.of_kind(ColumnType.IMAGE):
            how = "TFRecord files, interleaved, a shuffle buffer of 8,192 samples"
        else:
            how = "tensors over mapped files, shuffled over the whole epoch"
        return f"{how}; with its service several jobs share a cache, and may miss samples"

    def settings(self, workload: Workload, case: BenchCase, cores: int) -> tuple[Settings, ...]:
        share = max(cores // case.process_count, 1)
        fixed = (share, 2 * share) if workload.of_kind(ColumnType.IMAGE) else (1, max(share, 2))
        choices: list[Settings] = [{"parallel": parallel} for parallel in ("AUTOTUNE", *fixed)]
        # The mapped form of lists of different lengths cannot be sent to the service.
        if case.served and case.jobs > 1 and workload.shape != "text":
            choices.append({"parallel": "AUTOTUNE", "service": True})
        return tuple(choices)

    def prepare(self, workload: Workload, folder: Path) -> None:
        if not workload.of_kind(ColumnType.IMAGE):
            memmaps.write(workload, folder)
            return
        import tensorflow as tf

        def feature(value: bytes) -> Any:
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

        files = [folder / f"{index:05d}.tfrecord" for index in range(_FILES)]
        writers = [tf.io.TFRecordWriter(str(file)) for file in files]
        counts = [0] * _FILES
        for number, row in enumerate(rows.rows(workload, workload.shards)):
            example = {
                column.name: feature(samples.encoded(column, row[column.name]))
                for column in workload.columns
            }
            message = tf.train.Example(features=tf.train.Features(feature=example))
            writers[number % _FILES].write(message.SerializeToString())
            counts[number % _FILES] += 1
        for writer, file, count in zip(writers, files, counts, strict=True):
            writer.close()
            # The name has the count: a rank must know where its epoch ends.
            file.rename(file.with_stem(f"{file.stem}-{count}"))

    def open(self, task: TrialTask) -> TfPipeline:
        from dataplane_bench.peers.tf_pipelines import TfPipeline

        return TfPipeline(task)

    def serve(self, task: TrialTask) -> tuple[str, Any]:
        from dataplane_bench.peers.tf_pipelines import TfDataService

        service = TfDataService()
        return service.address, service
