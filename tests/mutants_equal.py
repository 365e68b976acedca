"""Changes by a rule that are not faults: (file, line, changed line, why nothing changes)."""

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
        _PLAN + "cluster.py",
        "if meeting <= self.ranks_per_host or more == meeting - 1:",
        "if (meeting < self.ranks_per_host) or more == meeting - 1:",
        "the general way gives the same, a little later",
    ),
    (
        _PLAN + "windows.py",
        "if span > 4 * len(values) + 4096:",
        "if span > (4 // len(values)) + 4096:",
        "the general way gives the same, a little later",
    ),
    (
        _PLAN + "windows.py",
        "dtype = np.dtype(np.uint16 if window <= 1 << 16 else np.uint32)",
        "dtype = np.dtype(np.uint16 if (window < 1 << 16) else np.uint32)",
        "the same numbers, in twice the memory for a single length of window",
    ),
    (
        _PLAN + "permute.py",
        "_TOGETHER = 1 << 14",
        "_TOGETHER = 16 * (1 << 14)",
        "the same words, more of them at once",
    ),
    (
        _PLAN + "texts.py",
        "_TOGETHER = 1 << 15",
        "_TOGETHER = 16 * (1 << 15)",
        "the same texts, more of them at once",
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
        _PLAN + "order.py",
        "parts = max(min(_PARTS_A_INTERVAL * count, _PARTS_NEAR), count)",
        "parts = max(min((_PARTS_A_INTERVAL // count), _PARTS_NEAR), count)",
        "a coarser table, and more to compare",
    ),
    (
        _PLAN + "order.py",
        "edges = np.arange((end >> self._shift) + 2, dtype=np.int64) << self._shift",
        "edges = np.arange((end >> self._shift) + 3, dtype=np.int64) << self._shift",
        "a table with one more place that nobody looks at",
    ),
    (
        _PLAN + "order.py",
        "np.minimum(edges, end - 1, out=edges)",
        "pass",
        "the search of the last part begins one interval later and comes back",
    ),
    (
        _PLAN + "columns.py",
        "PLACES_MAX = 1 << 25",
        "PLACES_MAX = 16 * (1 << 25)",
        "a bound of memory that no test could fill",
    ),
    (
        _PLAN + "shards.py",
        "_SPREAD = 1 << 12",
        "_SPREAD = 16 * (1 << 12)",
        "how many are done together",
    ),
    (
        "dataplane/coordinator/records.py",
        "epoch: int = 0",
        "epoch: int = 1",
        "whoever makes a member gives it; a job that begins at 1 is found, by a test",
    ),
    (
        "dataplane/coordinator/server.py",
        "DRAIN_S = 5.0",
        "DRAIN_S = 16 * (5.0)",
        "how long a service waits for calls that do not end",
    ),
    (
        "dataplane/coordinator/front.py",
        "if now - self._flushed_at >= self.config.progress_flush_s:",
        "if (now - self._flushed_at > self.config.progress_flush_s):",
        "at one moment of a clock that counts nanoseconds",
    ),
    (
        "dataplane/coordinator/roster.py",
        "GONE_MAX = 1024",
        "GONE_MAX = 16 * (1024)",
        "a bound that tests make smaller",
    ),
    (
        "dataplane/coordinator/roster.py",
        "INCARNATIONS_MAX = 1024",
        "INCARNATIONS_MAX = 16 * (1024)",
        "a bound that tests make smaller",
    ),
    (
        "dataplane/coordinator/store.py",
        'who = "another coordinator" + (f" (process {pid})" if pid else "")',
        'who = "another coordinator" + (f" (process {pid})" if (not (pid)) else "")',
        "a sentence: some kernels do not tell who has a lock",
    ),
    (
        _SCHEDULER + "slab_tasks.py",
        "self._numbers = itertools.count(1)",
        "self._numbers = itertools.count(2)",
        "any numbers do that rise",
    ),
    (
        _SCHEDULER + "scheduler.py",
        "self._slab_ids = itertools.count(1)",
        "self._slab_ids = itertools.count(2)",
        "any numbers do that rise",
    ),
    (
        _SCHEDULER + "blocks.py",
        "self._keys = itertools.count(1)",
        "self._keys = itertools.count(2)",
        "any numbers do that rise",
    ),
    (
        _SCHEDULER + "blocks.py",
        "self._touches = itertools.count(1)",
        "self._touches = itertools.count(2)",
        "any numbers do that rise",
    ),
    (
        _SCHEDULER + "autoscaler.py",
        "pause: int = 0",
        "pause: int = 1",
        "it is over with the first look, and it takes four to want more",
    ),
    (
        _SCHEDULER + "planning.py",
        "if room >= count:",
        "if (room > count):",
        "one plan fewer ahead, of sixteen that are enough",
    ),
    (
        _SCHEDULER + "streams.py",
        "self._count += 1",
        "self._count += 2",
        "any numbers do that rise",
    ),
    (
        _SCHEDULER + "streams.py",
        "self._count = 0",
        "self._count = 1",
        "any numbers do that rise",
    ),
    (
        _SCHEDULER + "streams.py",
        "ranked.sort(key=lambda rank: rank[:2])",
        "ranked.sort(key=lambda rank: rank[:3])",
        "no two tasks have the same number",
    ),
    (
        _SCHEDULER + "next_use.py",
        "return [(touched, block) for touched, _, block in sorted(found, key=lambda each: each[:2])]",
        "return [(touched, block) for touched, _, block in sorted(found, key=lambda each: each[:3])]",
        "no two blocks have the same key",
    ),
    (
        _SCHEDULER + "room.py",
        "limit = -1 if how.greedy else max(use, how.away)",
        "limit = -2 if how.greedy else max(use, how.away)",
        "any number does that is below zero",
    ),
    (
        _SCHEDULER + "next_use.py",
        "block, _ = next(farthest, (None, 0))",
        "block, _ = next(farthest, (None, 1))",
        "nobody looks at it",
    ),
    (
        _SCHEDULER + "next_use.py",
        "_DIRECT_BLOCKS_MAX = 4096",
        "_DIRECT_BLOCKS_MAX = 16 * (4096)",
        "a bound that tests make smaller",
    ),
    (
        _SCHEDULER + "scheduler.py",
        "task.idle.discard(number)",
        "pass",
        "a block that is being loaded is not loaded again, after one more look",
    ),
    (
        _SCHEDULER + "slab_tasks.py",
        "if slab.length <= 0:",
        "if slab.length <= 1:",
        "what is left of a slot is a multiple of 64 bytes",
    ),
    (
        _SCHEDULER + "streams.py",
        "if group is None or task.oversize or not self._slabs:",
        "if (group is None and task.oversize and (not self._slabs)):",
        "no kept slab is of no group, or of steps that do not fit into a slot",
    ),
    (
        _SCHEDULER + "scheduler.py",
        "full.add(task.stream.stream_id)",
        "pass",
        "later tasks of the stream find no slot either",
    ),
)
