"""What a session refuses when the node that comes back is not what the last one was."""

from __future__ import annotations

import pytest
from fake_node import Script, serving

from dataplane.client.stream import SlabStream
from dataplane.errors import DatasetChangedError, SpecMismatch


def test_a_dataset_that_changed_meanwhile_is_not_served(name, session) -> None:
    mine = session()
    with serving(Script(), name):
        stream = SlabStream(mine, 0, 0)
        stream.batches_from(0)
    with serving(Script(salt="other"), name):
        with pytest.raises(DatasetChangedError):
            stream.batches_from(1)
        stream.close()
        mine.close()


def test_a_node_that_comes_back_with_other_pixels_is_not_read(name, session) -> None:
    mine = session()
    with serving(Script(pixels="Pillow 12.2.0 ()"), name):
        stream = SlabStream(mine, 0, 0)
        stream.batches_from(0)
    with serving(Script(pixels="Pillow 13.0.0 ()"), name):
        with pytest.raises(SpecMismatch, match=r"13\.0\.0.*12\.2\.0") as caught:
            stream.batches_from(1)
        assert caught.value.field == "pixels"
        stream.close()
        mine.close()
