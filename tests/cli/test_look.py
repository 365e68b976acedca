"""`dataplane look`: its page shows what a loader's batch has, and runs nothing that data contain."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browser import open_page
from dataplane_torch import (
    DataLoader,
    Mixture,
    Pack,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Source,
)
from pictures import drawn, encoded
from PIL import Image
from signed_server import signed_server
from small_nodes import alone_and_small

from dataplane.cli import run

HOSTILE = "</td><script>document.title='owned'</script><img src=x onerror=alert(1)>"
CROP = {"jpg": [RandomResizedCrop(64), RandomHorizontalFlip()]}


def looked(capsys, *arguments: str):
    assert run(["look", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments: str) -> str:
    assert run(["look", *arguments]) == 2
    return capsys.readouterr().err


def test_crops_are_those_of_the_batch_and_hostile_values_stay_text(
    tmp_path, capsys, monkeypatch
) -> None:
    images = [encoded(drawn(90, 120, seed=number)) for number in range(24)]
    table = pa.table({
        "jpg": pa.array(images, pa.binary()),
        "x": pa.array([None, *range(1, 24)], pa.int64()),
        HOSTILE: [HOSTILE] * 24,
    })  # fmt: skip
    pq.write_table(table, "images.parquet", row_group_size=8)
    page = tmp_path / "page.html"
    options = ("--seed", "3", "--global-batch", "8", "--step", "1", "-o", str(page))
    steps = "jpg=RandomResizedCrop(64), RandomHorizontalFlip()"
    facts = looked(capsys, "images.parquet", *options, "--transform", steps)

    alone_and_small(monkeypatch, tmp_path)
    columns = {"columns": ["jpg", "x"], "nulls": "mask", "transforms": CROP}
    with DataLoader("images.parquet", 8, shuffle=True, seed=3, **columns) as loader:
        _, batch, *_ = loader
    sources = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page.read_text())
    shots = [np.array(Image.open(io.BytesIO(base64.b64decode(source)))) for source in sources]
    assert len(shots) == 16  # each whole, and as it is cropped
    assert shots[0].shape == (90, 120, 3)
    for shown, given in zip(shots[1::2], batch["jpg"].numpy(), strict=True):
        assert np.abs(shown.astype(int) - given).mean() < 8  # a JPEG of it
    assert [row["x"] or 0 for row in facts["samples"]] == batch["x"].tolist()
    assert {shot["dtype"] for shot in facts["images"]} == {"uint8"}
    assert {shot["is_flipped"] for shot in facts["images"]} == {True, False}
    assert facts["columns"][1]["dtype"] == "int64"

    opened = open_page(page, 360)
    assert opened.said == []
    assert not opened.page.all("script")
    (title,) = opened.page.all("title")
    assert title.text == "step 1 of epoch 0 of images.parquet"
    assert any(cell.text == HOSTILE for cell in opened.page.all("th"))
    assert sum(cell.text == HOSTILE for cell in opened.page.all("td")) >= 8


def test_a_ledger_of_packs_shows_documents_and_the_shares_of_sources(
    tmp_path, capsys, monkeypatch
) -> None:
    alone_and_small(monkeypatch, tmp_path)
    for name, tokens in {"short": 3, "long": 16}.items():
        table = pa.table({"tokens": pa.array([[7] * tokens] * 60, pa.list_(pa.int32()))})
        pq.write_table(table, f"{name}.parquet", row_group_size=20)
    sources = {name: Source(tmp_path / f"{name}.parquet", weight=1) for name in ("short", "long")}
    mixture = Mixture(sources, exhausted="cycle", length=40)
    with DataLoader(mixture, 8, pack=Pack("tokens", 16)) as loader:
        next(iter(loader))
        Path("ledger.jsonl").write_text(loader.ledger())
    facts = looked(capsys, "ledger.jsonl", "-o", "page.html")
    assert sum(facts["sources"].values()) == len(facts["packs"]) == 8
    assert facts["sources"]["short"] in (3, 4, 5)
    for pack in facts["packs"]:
        assert pack["length"] == 16
        counts = [document["tokens"] for document in pack["documents"]]
        assert counts in ([16], [3] * 5)
        assert pack["documents"][-1]["begins"][0] == 7
    page = Path("page.html").read_text()
    assert "5 documents, 15 of 16 tokens" in page
    assert "short: " in page


def test_damaged_images_are_counted_and_images_have_the_names_of_their_files(capsys) -> None:
    whole = encoded(drawn(90, 120, seed=1))
    for name, content in {"cat/0": b"no", "cat/1": whole, "dog/2": whole[:900]}.items():
        Path(f"photos/{name}.jpg").parent.mkdir(parents=True, exist_ok=True)
        Path(f"photos/{name}.jpg").write_bytes(content)
    assert run(["look", "photos", "--no-shuffle", "-o", "page.html"]) == 0
    said = "2 of 3 images of image are damaged: cat/0.jpg, dog/2.jpg"
    assert capsys.readouterr().err == f"warning: {said}\n"
    page = Path("page.html").read_text()
    assert said in page
    assert "image at position 1; cat/1.jpg; label cat; 90 x 120<" in page


_STEPS = (
    ' Write it as in --transform "jpg=RandomResizedCrop(224), RandomHorizontalFlip()"; steps are '
    "CenterCrop, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize, ToDtype, ToLayout"
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--transform", "x=CentreCrop(8)"),
            "there is no step 'CentreCrop'; did you mean 'CenterCrop'?" + _STEPS,
        ),
        (("--transform", "x=CenterCrop()"), "CenterCrop() is not CenterCrop(size)." + _STEPS),
        (("--transform", "x=8"), "--transform 'x=8': 8 is not a step." + _STEPS),
        (
            ("--transform", "jpg=CenterCrop(8)"),
            "transforms of 'jpg': no column of bytes has this name (columns of bytes are none)",
        ),
        (("--step", "9"), "1 step, counted from 0"),
        (("--where", "x", "==", "3"), "--where x: quote the whole condition, as in --where"),
        (
            ("--split", "val:1%"),
            "split 'val:1%': write NAME:SHARE, as in train:0.99, validation:0.01 or my:0.98:0.99",
        ),
        (("--format", "parket"), "no format is named 'parket'; did you mean 'parquet'? (there are"),
        (("-o", "no/such.html"), "give another file with -o"),
        (("--dp-rank", "1"), "ranks run from 0 to 0"),
    ],
)
def test_what_cannot_be_shown_is_refused(capsys, arguments, words) -> None:
    pq.write_table(pa.table({"x": range(10)}), "x.parquet")
    assert words in refused(capsys, "x.parquet", *arguments)
    assert not Path("look.html").exists()


def test_half_floats_and_infinite_values_have_figures(capsys) -> None:
    halves = pa.array(np.array([0.5, -2, 4], np.float16))
    table = pa.table({"half": halves, "wide": [1.0, float("nan"), float("inf")], "n": [1, 2, 3]})
    pq.write_table(table, "x.parquet")
    assert run(["look", "x.parquet", "--no-shuffle", "--json"]) == 0

    def fail(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    facts = json.loads(capsys.readouterr().out, parse_constant=fail)
    half, wide, n = facts["columns"]
    assert (half["min"], half["max"]) == (-2, 4)
    assert half["mean"] == pytest.approx(2.5 / 3)
    assert (wide["min"], wide["max"], wide["mean"]) == (1, "Infinity", "NaN")
    assert (n["min"], n["max"], n["mean"]) == (1, 3, 2)


def test_no_secret_of_a_url_is_shown(tmp_path, capsys) -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"x": range(8)}), file)
    query = "X-Amz-Signature=0123456789abcdefsigned"
    with signed_server() as server:
        url = server.add(f"/x.parquet?{query}", file.getvalue())
        url = url.replace("http://", "http://user:hunter2secret@")
        assert run(["look", url]) == 0
        texts = [*capsys.readouterr(), Path("look.html").read_text()]
        for command in (["look", "--json"], ["trace", "--step", "0", "--global-batch", "8"]):
            assert run([*command, url]) == 0
            texts += capsys.readouterr()
    assert sum("/x.parquet?X-Amz-Signature=***" in text for text in texts) >= 3
    assert not any(secret in text for text in texts for secret in ("hunter2secret", "abcdefsigned"))


def test_images_beside_folders_of_classes_are_noted(tmp_path, capsys):
    for path in ("photos/cat/1.png", "photos/dog/2.png", "photos/3.png"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(encoded(drawn(4, 4)))
    assert run(["look", str(tmp_path / "photos"), "--json"]) == 0
    output = capsys.readouterr()
    assert "form a class of their own" in json.loads(output.out)["notes"][0]
    assert "form a class of their own" in output.err
