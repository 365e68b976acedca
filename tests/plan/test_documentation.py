from __future__ import annotations

import re
from pathlib import Path

from plan import golden

PAGE = Path(__file__).resolve().parents[2] / "docs" / "order.md"


def joined(values):
    return ", ".join(map(str, values))


def change(told):
    epoch, position, shares = told
    return f"{epoch}, {position}: {joined(shares)}"


def test_documentation_has_every_golden_vector_and_no_other():
    expected = [
        *((str(word), str(mixed)) for word, mixed in golden.MIX.items()),
        *((joined(parts), str(key)) for parts, key in golden.KEYS.items()),
        *((joined(asked), joined(found)) for asked, found in golden.PERMUTATIONS.items()),
        *((joined(sample), str(key)) for sample, key in golden.SAMPLE_KEYS.items()),
        *((joined(row), str(key)) for row, key in golden.SHARE_KEYS.items()),
        *((joined(rows), joined(rest), order) for (rows, *rest), order in golden.ORDERS.items()),
        *((joined(at), f"{block}.{row}") for at, (block, row) in golden.FAR.items()),
        *(
            ("; ".join(map(joined, shards)), joined(rest), places)
            for (shards, *rest), places in golden.TRAILS.items()
        ),
        *((joined(shares), sources) for shares, sources in golden.COUNTS.items()),
        *(
            (joined(counts), joined(shares), joined(rest), order)
            for (counts, shares, *rest), order in golden.MIXTURES.items()
        ),
        *(
            (joined(counts), joined(shares), joined(rest), "; ".join(map(change, changes)), order)
            for (counts, shares, *rest, changes), order in golden.CHANGED_MIXTURES.items()
        ),
        *((joined(at), f"{one}.{sample}") for at, (one, sample) in golden.FAR_MIXTURES.items()),
        *(
            (joined(lengths), joined("none" if one is None else one for one in rest), packs)
            for (lengths, *rest), packs in golden.PACKS.items()
        ),
        *((joined(at), f"{block}.{row}") for at, (block, row) in golden.BALANCED.items()),
        *(
            (joined(asked[:4]), joined(asked[4:]), str(row))
            for asked, row in golden.SUBSTITUTES.items()
        ),
        *(
            (joined(lengths), joined(rest), joined(gone), packs)
            for (lengths, *rest, gone), packs in golden.PACKS_WITHOUT.items()
        ),
    ]
    _, vectors = PAGE.read_text().split("## Golden vectors")
    rows = [line for line in vectors.splitlines() if line.startswith("| `")]
    assert [tuple(re.findall(r"`([^`]*)`", row)) for row in rows] == expected
