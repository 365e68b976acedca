"""The faults that `python tests/mutation.py` makes."""

from __future__ import annotations

from mutants_by_rule import mutants_of


def test_faults_know_which_lines_they_change() -> None:
    text = (
        '"""A docstring: 1 < 2."""\n'
        "_MOST = 1 << 4\n"
        "def short(x: int = 3) -> bool:\n"
        "    if x < _MOST and (\n"
        "        x > 0\n"
        "    ):\n"
        "        return True\n"
        '    raise ValueError(f"{x + 1}")\n'
    )
    found = [(c.how, c.before, c.after, sorted(c.lines)) for c in mutants_of(text)]
    assert found == [
        ("constant", "_MOST = 1 << 4", "_MOST = 16 * (1 << 4)", [4]),
        ("constant", "def short(x: int = 3) -> bool:", "def short(x: int = 4) -> bool:", [3]),
        ("condition", "if x < _MOST and ( x > 0 ):", "if (not (x < _MOST and x > 0)):", [4, 5, 6]),
        ("and/or", "if x < _MOST and ( x > 0 ):", "if (x < _MOST or x > 0):", [4, 5, 6]),
        ("comparison", "if x < _MOST and (", "if (x <= _MOST) and (", [4]),
        ("comparison", "x > 0", "(x >= 0)", [4, 5]),
        ("constant", "x > 0", "x > 1", [4, 5]),
        ("constant", "return True", "return False", [7]),
    ]
