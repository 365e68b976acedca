"""Pipeline stages get the columns that they ask for, context-parallel ranks their part of each
sequence. One process plays all ranks of a dp rank: their loaders open one job.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataplane_torch import DataLoader, ShardedIterableDataset, Topology
from dataplane_torch.parts import RankParts, parts_of
from device_steps import content, expect_nothing_left, step

from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnSpec, Kind
from dataplane.rpc.messages import OpenJob, OpenStream

COUNT, LENGTH = 50, 12
BY_STAGE = {0: ["tokens"], -1: ["labels", "weight"]}


@pytest.fixture
def shards(tmp_path: Path, shared_node: None) -> str:
    rows = torch.arange(COUNT * LENGTH).view(COUNT, LENGTH)
    lists = pa.list_(pa.int64(), LENGTH)
    table = pa.table(
        {
            "tokens": pa.array(rows.tolist(), lists),
            "labels": pa.array((rows + 1).tolist(), lists),
            "weight": pa.array([None if i % 3 == 0 else i / 2 for i in range(COUNT)]),
            "ragged": [list(range(i % 4)) for i in range(COUNT)],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=20)
    return str(tmp_path / "rows.parquet")


def rank(number: int, *, pp: tuple[int, int] = (0, 1), cp: tuple[int, int] = (0, 1)) -> Topology:
    size = pp[1] * cp[1]
    places = dict(zip(("pp_rank", "pp_size", "cp_rank", "cp_size"), (*pp, *cp), strict=True))
    return Topology(0, 1, number, size, number, size, **places)


def test_stages_get_their_columns_of_the_same_batches(shards) -> None:
    given = {"batch_size": 8, "shuffle": True, "seed": 5, "name": "stages", "nulls": "mask"}
    with DataLoader(shards, **given | {"name": "whole"}, topology=rank(0, pp=(0, 3))) as loader:
        whole, state = list(loader), loader.state_dict()
    with ExitStack() as stack:
        stages = [
            stack.enter_context(
                DataLoader(
                    shards, **given, topology=rank(at, pp=(at, 3)), columns_by_stage=BY_STAGE
                )
            )
            for at in range(3)
        ]
        first, middle, last = map(list, stages)
        assert [one.state_dict() for one in stages] == [state] * 3
        assert [list(one) for one in (first[0], middle[0], last[0])] == [
            ["tokens", "tokens.is_null"],
            [],
            ["labels", "labels.is_null", "weight", "weight.is_null"],
        ]
        assert [len(one) for one in (first, middle, last)] == [len(whole)] * 3
        for batch, ours in zip(whole, zip(first, last, strict=True), strict=True):
            for name, values in [*ours[0].items(), *ours[1].items()]:
                assert torch.equal(values.nan_to_num(-1), batch[name].nan_to_num(-1))
        assert [column.name for column in stages[2].schema] == list(last[0])
        assert len(stages[1].schema) == 0
        assert [one.epoch for one in stages] == [1, 1, 1]


def test_a_run_without_stages_gets_the_columns_of_first_and_last() -> None:
    assert parts_of(Topology(), BY_STAGE, None).columns == ("tokens", "labels", "weight")
    assert parts_of(Topology(), None, None) == RankParts()


def test_a_stage_without_columns_counts_the_steps_and_rows_of_the_others(shards) -> None:
    given = {"batch_size": 4, "end": "pad", "name": "counted"}
    with ExitStack() as stack:
        first, middle = (
            stack.enter_context(
                DataLoader(
                    shards,
                    **given,
                    topology=Topology(1, 2, 2 + at, 6, pp_rank=at, pp_size=3),
                    columns_by_stage=BY_STAGE,
                )
            )
            for at in range(2)
        )
        counts, states = [], []
        for one in (first, middle):
            counts.append([(one.valid_count, one.state_dict()["cursor"]) for _ in one])
            states.append(one.state_dict())
            one.load_state_dict({**states[-1], "epoch": 1, "cursor": 24})
            counts.append([(one.valid_count, one.state_dict()["cursor"]) for _ in one])
    assert counts[0] == counts[2]
    assert counts[1] == counts[3]
    assert len(counts[0]) == 7
    assert counts[0][-1][0] == 1
    assert states[0] == states[1]


def test_the_node_makes_no_slab_for_a_stage_without_columns(fake) -> None:
    node = fake()
    place = rank(1, pp=(1, 3))
    with DataLoader("/data", 10, topology=place, columns_by_stage={0: ["i"]}) as loader:
        assert list(loader) == [{}] * 10
        assert loader.state_dict()["epoch"] == 1
    assert not [one for one in node.seen if isinstance(one, OpenStream)]
    asked = [one for one in node.seen if isinstance(one, OpenJob)]
    with DataLoader("/data", 10, topology=place) as loader:
        assert len(list(loader)) == 10
    whole = [one for one in node.seen if isinstance(one, OpenJob)][-1]
    assert (
        asked[0].spec.column_options == whole.spec.column_options
    )  # so that stages share what is made


def test_parts_of_sequences_are_views_of_the_same_memory(shards) -> None:
    given = {"batch_size": 8, "shuffle": True, "seed": 5, "columns": ["tokens", "weight"]}
    with ExitStack() as stack:
        parts = [
            stack.enter_context(
                DataLoader(
                    shards, **given, fill_null=0, name="parts", topology=rank(at, cp=(at, 3)),
                    sequence_part=["tokens"],
                )
            )
            for at in range(3)
        ]  # fmt: skip
        batches = [next(iter(one)) for one in parts]
        with DataLoader(shards, **given, fill_null=0, topology=rank(0, cp=(0, 3))) as loader:
            whole = next(iter(loader))
        assert torch.equal(torch.cat([one["tokens"] for one in batches], 1), whole["tokens"])
        assert all(torch.equal(one["weight"], whole["weight"]) for one in batches)
        part = batches[2]["tokens"]
        assert part.shape == (8, LENGTH // 3)
        assert part.stride() == (LENGTH, 1)
        assert part.untyped_storage().nbytes() == 8 * LENGTH * 8
        assert parts[2].schema["tokens"].shape == (None, LENGTH // 3)
        assert parts[0].state_dict() == parts[2].state_dict()


def test_parts_on_a_device_are_those_of_the_host(shards, onto) -> None:
    given = {"batch_size": 8, "columns": ["tokens"], "sequence_part": ["tokens"]}
    with DataLoader(shards, **given, topology=rank(1, cp=(1, 3))) as loader:
        expected = [content(batch) for batch in loader]
    device = onto()
    with DataLoader(shards, **given, topology=rank(1, cp=(1, 3)), device="cuda") as loader:
        batches = iter(loader)
        for want in expected:
            step(device, batches, want)
        del batches
    expect_nothing_left(device)


def test_workers_of_torchs_loader_send_their_part_alone(shards) -> None:
    dataset = ShardedIterableDataset(
        shards, 10, topology=rank(1, cp=(1, 2)), sequence_part=["tokens"],
        columns_by_stage={0: ["tokens"]},
    )  # fmt: skip
    with closing(dataset):
        (column,) = dataset.schema
        assert column.shape == (None, LENGTH // 2)
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1)
        batches = list(loader)
    rows = torch.cat([batch["tokens"] for batch in batches])
    expected = torch.arange(COUNT * LENGTH).view(COUNT, LENGTH)[:, LENGTH // 2 :]
    assert torch.equal(rows, expected)
    assert batches[0]["tokens"].untyped_storage().nbytes() == 10 * (LENGTH // 2) * 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"columns_by_stage": ["tokens"]}, "pass a dict of column names by stage"),
        ({"columns_by_stage": {0: "tokens"}}, "pass a list of column names"),
        ({"columns_by_stage": {2: ["tokens"]}}, r"stage 2, but the stages are 0 to 1.*dp=1 pp=2"),
        ({"columns_by_stage": {-3: ["tokens"]}}, "stage -3"),
        ({"columns_by_stage": {"first": ["tokens"]}}, "Use 0 and -1 for the first and the last"),
        ({"sequence_part": "tokens"}, "pass a list of column names"),
        ({"sequence_part": [1]}, "pass a list of column names"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(given, said) -> None:
    place = Topology(pp_rank=1, pp_size=2, source="DeepSpeed: dp=1 pp=2")
    with pytest.raises(ConfigError, match=said) as caught:
        DataLoader("/data", topology=place, **given)
    assert caught.value.field in given


def test_columns_that_a_rank_cannot_have_are_refused() -> None:
    specs = [
        ColumnSpec("tokens", Kind.FIXED, "int64", (12,)),
        ColumnSpec("lists", Kind.PADDED, "int64"),
        ColumnSpec("weight", Kind.FIXED, "float32"),
        ColumnSpec("text", Kind.STRING, ""),
    ]
    for parts, said in (
        (
            RankParts(("label",)),
            "columns_by_stage names 'label', but the columns .* are tokens, lists",
        ),
        (RankParts(None, ("label",)), "sequence_part names 'label'"),
        (RankParts(None, ("weight",)), "'weight', which has no sequence"),
        (RankParts(None, ("text",)), "'text', which has no sequence"),
        (
            RankParts(None, ("tokens",), 0, 5),
            "'tokens' have 12 values here, which 5 context-parallel",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            parts.chosen(specs)
    parts = RankParts(("lists",), ("lists", "tokens"), 1, 2)
    assert parts.chosen(specs) == {"lists"}
    assert parts.cut("lists", torch.arange(12).view(2, 6)).tolist() == [[3, 4, 5], [9, 10, 11]]
    with pytest.raises(ConfigError, match="'lists' have 5 values here"):
        parts.cut("lists", torch.zeros(2, 5))
