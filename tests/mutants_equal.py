"""Changes by a rule that are no fault: (file, the line, the line after it, why nobody can tell)."""

from __future__ import annotations

_PLAN, _SCHEDULER = "dataplane/plan/", "dataplane/scheduler/"

EQUAL = (
    (
        _PLAN + "windows.py",
        "span = int(values.max() - low) + 1",
        "span = int(values.max() - low) + 2",
        "a table with one more place that no value has",
    ),
    (
        _PLAN + "windows.py",
        "first, last = int(offset.min()) // self._window, int(offset.max()) // self._window",
        "first, last = int(offset.min()) // self._window, (int(offset.max()) * self._window)",
        "the general way gives the same, a little later",
    ),
    (
        _PLAN + "windows.py",
        "if self._window == 1 or not len(lane):",
        "if (self._window == 1 and (not len(lane))):",
        "windows of one sample are permuted to what they were",
    ),
    (
        _PLAN + "texts.py",
        "contents.append(head.view(np.uint8).reshape(-1))",
        "contents.append(head.view(np.uint8).reshape(-2))",
        "numpy takes any negative number there",
    ),
    (
        _SCHEDULER + "autoscaler.py",
        "pause: int = 0",
        "pause: int = 1",
        "it is over with the first look, and it takes four to want more",
    ),
    (
        _SCHEDULER + "scheduler.py",
        "if room >= count:",
        "if (room > count):",
        "one plan fewer ahead, of sixteen that are enough",
    ),
)
