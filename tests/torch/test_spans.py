"""Spans of slabs, as the SDK of OpenTelemetry records them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # A process has one provider for good.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def length(span: ReadableSpan) -> int:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.end_time - span.start_time


def test_each_slab_is_a_span_with_its_stages(
    shared_node: object, tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    pq.write_table(pa.table({"x": range(400)}), tmp_path / "a.parquet", row_group_size=50)
    with DataLoader(tmp_path / "a.parquet", batch_size=40, name="spans") as loader:
        assert sum(len(batch["x"]) for batch in loader) == 400
    spans = exporter.get_finished_spans()
    slabs = [span for span in spans if span.name == "dataplane.slab"]
    assert sum(int(str((slab.attributes or {})["dataplane.samples"])) for slab in slabs) == 400
    first = slabs[0].attributes
    assert first is not None
    assert (first["dataplane.job"], first["dataplane.rank"], first["dataplane.epoch"]) == (
        "spans",
        0,
        0,
    )
    assert first["dataplane.step"] == 0
    for slab in slabs:
        inside = [
            child
            for child in spans
            if child.parent and child.parent.span_id == slab.context.span_id
        ]
        stages = [child for child in inside if child.name != "dataplane.wait"]
        assert {child.name for child in stages} <= {
            f"dataplane.{name}"
            for name in ("fetch", "decode", "room", "queue", "assemble", "ready")
        }
        assert sum(map(length, stages)) == length(slab)
        ends = [child.end_time for child in stages]
        assert ends == sorted(ends)
        assert ends[-1] == slab.end_time
    assert any(span.name == "dataplane.wait" for span in spans)


def test_without_a_provider_there_are_no_spans(shared_node: object, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(40)}), tmp_path / "a.parquet")
    with DataLoader(tmp_path / "a.parquet", batch_size=40) as loader:
        assert len(list(loader)) == 1
