"""Slabs for nodes that may read only some urls."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from making_node import REFUSED, MakerNode, play
from msgspec import Raw
from msgspec.structs import replace

from dataplane.index.indexing import index_dataset
from dataplane.model.config import Stage
from dataplane.model.records import DatasetIdentity
from dataplane.node.making import TRY_AGAIN_S
from dataplane.node.opener import OpenedJob
from dataplane.rpc.codec import encode
from dataplane.rpc.messages import OpenJob


@pytest.mark.timeout(100)
def test_slabs_are_made_only_of_what_the_askers_key_is_for(
    parquet: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of a job that others have asked for before, with a key for everything."""
    folder = Path(parquet).parent.as_uri()

    async def scene(node: MakerNode) -> None:
        wanted = node.wanted(0)
        whole = await node.slab(wanted)
        elsewhere = f"{folder}/another"
        count = len(node.opened)
        assert await node.answer(node.ask(wanted, only_under=(elsewhere,))) == REFUSED
        await node.until(lambda: "lies outside of" in caplog.text)
        node.passes(2 * TRY_AGAIN_S)
        assert await node.answer(node.ask(wanted, only_under=(elsewhere,))) == REFUSED
        assert len(node.opened) == count, "it is not even looked at"
        (line,) = [one.getMessage() for one in caplog.records if "lies outside" in one.message]
        assert elsewhere in line
        caplog.clear()
        before = (("", (f"{folder}/*", "/elsewhere/a.parquet")),)
        stage = Stage("d", 0, 1, 2, DatasetIdentity("c", "l"), unread=True, before=before)
        spec = replace(node.request.spec, stages=(stage,))
        opening = Raw(encode(replace(node.request, spec=spec)))
        named = replace(wanted, opening=opening, digest="another")
        limits = {"only_under": (f"{folder}/",)}
        assert await node.answer(node.ask(named, **limits)) == REFUSED
        await node.until(lambda: "lies outside of" in caplog.text)
        assert "file:///elsewhere/a.parquet lies outside of" in caplog.text
        assert len(node.opened) == count, "former datasets are not opened either"
        inside = await node.slab(wanted, only_under=(f"{folder}/",))
        assert inside.content == whole.content

    play(scene, parquet, tmp_path)


@pytest.mark.timeout(60)
def test_former_shards_that_a_list_names_are_checked_too(
    parquet: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A manifest that lies inside may name shards elsewhere."""
    elsewhere = shutil.copytree(Path(parquet).parent, f"{tmp_path}-elsewhere")
    former = index_dataset(f"{elsewhere}/*.parquet").shards

    async def scene(node: MakerNode) -> None:
        opened = node.opener.job

        async def job(request: OpenJob, digest: str = "") -> OpenedJob:
            return replace(await opened(request, digest), before=(former,))

        node.opener.job = job  # type: ignore[method-assign]
        wanted = node.wanted(0)
        limits = {"only_under": (f"{Path(parquet).parent.as_uri()}/",)}
        assert await node.answer(node.ask(wanted, **limits)) == REFUSED
        await node.until(lambda: "not made" in caplog.text or "no slabs of this" in caplog.text)
        assert f"{former.urls[0]} lies outside of" in caplog.text

    play(scene, parquet, tmp_path)
