"""List the objects below a prefix, many pages at a time.

An object store returns a list in pages of a thousand keys, each of which says where the next one
begins. Reading them one after the other, a million keys take a thousand round trips. But a page can
begin at any key, so the keys are divided into ranges, which are listed in parallel.

The distribution of keys is unknown. It is assumed to be uniform over all texts that the characters
seen so far can spell, which holds for numbers and hashes. The range that seems the longest is
divided in the middle. A wrong guess costs a page without new keys.

Invariants:
1. Each key is in one range, wherever ranges are divided.
2. No range is divided while more pages were useless than `_WASTED_MIN` plus `_WASTED` times the
   number of useful ones. A list of one page takes one request.
3. A page that fails is requested again alone.
4. Some servers do not list in the order of keys, but list a folder before names that begin with its
   name. So each range must begin exactly where the previous one stopped: then the ranges together
   equal a list that was read page by page.
5. Objects without bytes are in no range, since some are listed under another key than their own
   ("folder" for "folder/"). They only show how far a page went.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import pairwise
from operator import attrgetter

from msgspec import Struct, field

from dataplane.model.records import ObjectInfo
from dataplane.store.base import LAST, NotInOrderError, Page

PAGES_AT_ONCE = 16
_WASTED = 0.2
_WASTED_MIN = 6.0
_LONG_PAGES = 3.0
"""A range that seems to have fewer pages left is not divided."""
_LEAP = 4.0
_DOUBT = 2.0
"""If a new range turns out to be empty, the range before it seems shorter by this factor."""
_SAMPLES = 16
_PRECISION = 1 / 16
_SPAN_MIN = 1e-14
_DIGITS, _HEX = set("0123456789"), set("0123456789abcdef")


class KeyRange(Struct, eq=False):
    """Keys still to be listed: those after `after`, up to and including `until`."""

    after: str
    until: str
    objects: list[ObjectInfo] = field(default_factory=list)
    pages: int = 0
    """How many pages of the range were read, without the last one."""
    first: str = ""
    next: str = ""
    """The first key after the range's start, and the first after its end, of objects with bytes;
    empty if there is none.
    """
    leap: float = _LEAP
    """How many pages a new range may begin ahead while the end is unknown."""
    is_open: bool = True
    """Whether the rest of the range may be empty."""
    doubt: float = 1.0
    cut_from: KeyRange | None = None
    """The range that this one was divided from, until its own first page has come."""


class Spelling:
    """The characters seen at each place of the keys. They map a key to a number from 0 to 1: a
    fraction whose digits are its characters, where each place has its own base.
    """

    def __init__(self) -> None:
        self._seen: list[set[str]] = []
        self._choices: list[list[str]] = []

    def learn(self, keys: Sequence[str]) -> None:
        """Learn from a few of the keys of a page."""
        count = sum(map(len, self._seen))
        for key in (*keys[:: max(1, len(keys) // _SAMPLES)], keys[-1]):
            self._seen += [set() for _ in range(len(key) - len(self._seen))]
            for seen, character in zip(self._seen, key, strict=False):
                seen.add(character)
        if sum(map(len, self._seen)) > count:
            self._choose()

    def number(self, key: str) -> float:
        """Return the position of the key, from 0 to 1, among all keys that can be spelled."""
        number, span = 0.0, 1.0
        for character, choices in zip(key, self._choices, strict=False):
            index = bisect_left(choices, character)
            span /= len(choices)
            number += index * span
            if span < _SPAN_MIN or choices[index : index + 1] != [character]:
                break
        return number

    def key(self, number: float, precision: float) -> str:
        """Return the shortest prefix of a key that corresponds to about this number."""
        spelled, span = "", 1.0
        for choices in self._choices:
            if span < precision:
                break
            span /= len(choices)
            index = min(int(number / span), len(choices) - 1)
            number -= index * span
            spelled += choices[index]
        return spelled

    def _choose(self) -> None:
        """Choose the digits of each place. A number or a hash may have any digit at every place
        where digits were seen to vary, and at earlier places: all keys of the first page may begin
        with the same digits.
        """
        after: set[str] = set()
        chosen = []
        for seen in reversed(self._seen):
            choices = seen
            if seen <= after:
                choices = after
            elif len(seen) > 1 and seen & _DIGITS:
                choices = seen | (_HEX if seen & (_HEX - _DIGITS) else _DIGITS)
            after = choices if len(choices) > 1 else set()
            chosen.append(sorted(choices))
        self._choices = chosen[::-1]


class Listing:
    """The state of a listing: the pages to request next, and the objects received so far. Keys are
    the parts of urls after the prefix.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._spelling = Spelling()
        self._ranges = [KeyRange("", LAST)]
        self._due = self._ranges[:]
        self._asked: list[KeyRange] = []
        self._useful = self._wasted = 0.0
        self._empty: dict[str, ObjectInfo] = {}

    def due(self) -> KeyRange | None:
        """Return a range whose next page should be requested now; None if there is none."""
        taken = self._due.pop(0) if self._due else self._cut()
        if taken is not None:
            self._asked.append(taken)
        return taken

    def answered(self, part: KeyRange, page: Page) -> None:
        """Add the page that follows the `after` of a range.

        Raises:  NotInOrderError: the page does not come after that key.
        """
        keys = [info.url[len(self._prefix) :] for info in page.objects]
        self._empty.update((info.url, info) for info in page.empty)
        count = bisect_right(keys, part.until)
        part.objects += page.objects[:count]
        part.first = part.first or next(iter(keys), "")
        part.next = next(iter(keys[count:]), "")
        useful = count / len(keys) if keys else float(bool(page.empty))
        self._useful += useful
        self._wasted += 1.0 - useful
        origin, part.cut_from = part.cut_from, None
        if origin is not None:
            origin.is_open, origin.doubt = False, 1.0 if count else origin.doubt * _DOUBT
        self._asked.remove(part)
        if count == len(keys) and not page.is_last:
            ends = [info.url[len(self._prefix) :] for info in page.empty] + keys[-1:]
            end = max(ends, default="")
            if part.pages and end <= part.after:
                raise NotInOrderError(f"{self._prefix}{part.after}: what follows ends before it")
            self._spelling.learn(keys or ends)
            part.after, part.doubt = end, max(1.0, part.doubt / _DOUBT)
            part.pages += 1
            self._due.append(part)

    def found(self) -> list[ObjectInfo]:
        """Return all objects received, in url order.

        Raises:  NotInOrderError: a range does not begin where the one before it stopped.
        """
        if any(part.next != following.first for part, following in pairwise(self._ranges)):
            raise NotInOrderError(f"{self._prefix}: a list goes on elsewhere than it stopped")
        full = [info for part in self._ranges for info in part.objects]
        if not self._empty:
            return full
        # Drop an empty "folder/" that is listed as "folder", if an object "folder" has bytes.
        for info in full:
            self._empty.pop(info.url, None)
        by_url = attrgetter("url")
        return [*heapq.merge(full, sorted(self._empty.values(), key=by_url), key=by_url)]

    def _cut(self) -> KeyRange | None:
        """Divide the range that seems the longest."""
        longest = max(self._asked, key=self._pages_left, default=None)
        is_wasteful = self._wasted > _WASTED_MIN + _WASTED * self._useful
        if longest is None or is_wasteful or self._pages_left(longest) < _LONG_PAGES:
            return None
        start, end = map(self._spelling.number, (longest.after, longest.until))
        part = 0.5
        if longest.is_open:
            part = min(0.5, longest.leap / self._pages_left(longest))
        number = start + part * (end - start)
        cut = self._as_path(self._spelling.key(number, part * (end - start) * _PRECISION))
        if not longest.after < cut < longest.until:
            longest.doubt *= _DOUBT
            return None
        leap = longest.leap * _LEAP
        rest = KeyRange(cut, longest.until, leap=leap, is_open=longest.is_open, cut_from=longest)
        longest.until = cut
        self._ranges.insert(self._ranges.index(longest) + 1, rest)
        return rest

    def _pages_left(self, part: KeyRange) -> float:
        """Estimate the number of pages left. A range is not divided before its first page, nor
        while an earlier division of it has not proved useful.
        """
        if not part.pages or any(other.cut_from is part for other in self._asked):
            return 0.0
        first, after, until = map(self._spelling.number, (part.first, part.after, part.until))
        page_span = max((after - first) / part.pages, _SPAN_MIN)
        return (until - after) / page_span / part.doubt

    def _as_path(self, cut: str) -> str:
        """Shorten a key to the part before the first component that no key can have."""
        parts = f"{self._prefix}{cut}".split("/")
        bad = next((i for i, part in enumerate(parts) if i > 2 and part in ("", ".", "..")), None)
        return "/".join(parts[:bad])[len(self._prefix) :]


def listed(prefix: str, ask: Callable[[str | None], Page]) -> list[ObjectInfo]:
    """Return every object below the prefix, in url order. `ask` returns the page after a url, or
    the first one; several threads call it.

    Raises:  NotInOrderError: the store does not list in url order.  Errors of `ask`.
    """
    listing = Listing(prefix)
    taken = listing.due()
    assert taken is not None
    listing.answered(taken, ask(None))
    requested: dict[Future[Page], KeyRange] = {}
    threads: ThreadPoolExecutor | None = None
    try:
        while True:
            while len(requested) < PAGES_AT_ONCE and (taken := listing.due()) is not None:
                threads = threads or ThreadPoolExecutor(PAGES_AT_ONCE, "listing")
                requested[threads.submit(ask, f"{prefix}{taken.after}")] = taken
            if not requested:
                return listing.found()
            for done in wait(requested, return_when=FIRST_COMPLETED).done:
                listing.answered(requested.pop(done), done.result())
    finally:
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
