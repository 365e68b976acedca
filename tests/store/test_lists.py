"""Lists of stores that give them in pages, and not always all of these."""

from __future__ import annotations

import pytest
from awry import Awry, Mood

from dataplane.model.errors import StoreError
from dataplane.store.connect import open_store


@pytest.mark.parametrize(("count", "asked"), [(999, 1), (1000, 2), (2500, 3)])
def test_a_list_has_all_of_its_pages(awry: Awry, count: int, asked: int) -> None:
    awry.objects = {f"bucket/many/{i:04d}": b"x" for i in range(count)}
    for mood in (Mood.WELL, Mood.NO_TOKEN):
        awry.be(then=mood)
        infos = list(open_store("s3://bucket").list("s3://bucket/many/"))
        assert [info.url for info in infos] == [f"s3://{name}" for name in awry.objects]
        assert len(awry.seen) == asked


def test_a_list_that_repeats_itself_is_refused(awry: Awry) -> None:
    awry.objects = {f"bucket/many/{i:04d}": b"x" for i in range(1001)}
    awry.be(then=Mood.AGAIN)
    with pytest.raises(StoreError, match="again and again") as raised:
        open_store("s3://bucket").list("s3://bucket/many/")
    assert type(raised.value) is StoreError
