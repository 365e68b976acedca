"""Plausible faults: (name, file, original text, faulty text)."""

from __future__ import annotations

_SCHEDULER = "dataplane/scheduler/scheduler.py"
_TASKS = "dataplane/scheduler/slab_tasks.py"
_WAITING = "dataplane/scheduler/holdings.py"
_BLOCKS = "dataplane/scheduler/blocks.py"
_SHARED = "dataplane/scheduler/streams.py"
_RECORDS = "dataplane/scheduler/records.py"

BY_HAND = (
    (
        "a dataset is never forgotten",
        "dataplane/scheduler/keeping.py",
        "DatasetForgotten: self._forget_dataset,",
        "DatasetForgotten: lambda event: None,",
    ),
    (
        "what is in use of a forgotten dataset stays",
        _BLOCKS,
        "        if dataset.dataset_id in self.forgotten:\n            for index",
        "        if False:\n            for index",
    ),
    (
        "what was on its way to a forgotten dataset stays",
        _BLOCKS,
        "        if block.dataset.dataset_id in self.forgotten and not block.lent:\n            self.evict(block)",
        "        if False:\n            self.evict(block)",
    ),
    (
        "tasks that are not the head evict what is needed sooner",
        _SCHEDULER,
        "self._load(task, greedy=False)",
        "self._load(task, greedy=True)",
    ),
    (
        "the head evicts nothing that is needed",
        _SCHEDULER,
        "self._load(head, greedy=is_urgent)",
        "self._load(head, greedy=False)",
    ),
    (
        "the arena is emptied although something is on its way",
        _SCHEDULER,
        "        if head is not None and head.missing and self.is_settled and not self._under_way:\n",
        "        if head is not None and head.missing:\n",
    ),
    (
        "an arena that was emptied for the head is filled by others",
        _SCHEDULER,
        "            loading = loading and self._emptied_for is None\n",
        "",
    ),
    (
        "the arena is not emptied for a head that is stuck",
        _SCHEDULER,
        "            self._excerpts.close()\n            self._blocks.drop_unpinned()\n",
        "            self._excerpts.close()\n",
    ),
    (
        "a fetched block stays where there is no room to decode it",
        _SCHEDULER,
        "            self._is_emptied_again = True\n            self._blocks.drop_unpinned()\n",
        "            self._is_emptied_again = True\n",
    ),
    (
        "the pins of a former head stay",
        _SCHEDULER,
        "            self._tasks.unpin(former)\n",
        "            pass\n",
    ),
    (
        "the head has no pins",
        _SCHEDULER,
        "        if task is not None:\n            self._tasks.pin(task)\n",
        "",
    ),
    (
        "what is ready without an event is not seen",
        _SCHEDULER,
        "        self.is_settled &= all(task.missing for task in lacking)\n",
        "",
    ),
    (
        "a slab keeps its share of the slots until something else happens",
        _SCHEDULER,
        "            self._deliver(stream)  # first: a slab that was handed over makes way for the next\n",
        "            pass\n",
    ),
    (
        "what a stream was making when it closed goes on",
        _SCHEDULER,
        "        for task in stream.tasks:\n            self._tasks.drop(task)\n",
        "",
    ),
    (
        "a holder that is gone keeps its slabs",
        "dataplane/scheduler/slab_tasks.py",
        "if loan.holder == event.holder",
        "if loan.holder != event.holder",
    ),
    (
        "pins stay after a slab was assembled",
        _TASKS,
        "        is_to_be_made = self._elsewhere.ended(task, event)\n        self.unpin(task)\n",
        "        is_to_be_made = self._elsewhere.ended(task, event)\n",
    ),
    (
        "what is assembled has no pins",
        _TASKS,
        "        self.pin(task)\n        kept = self._shared.wanted",
        "        kept = self._shared.wanted",
    ),
    (
        "the slot of what nobody wants any more is lost",
        _TASKS,
        "            self._elsewhere.leave(task)\n            self._free_slot(task)\n            self._excerpts",
        "            self._elsewhere.leave(task)\n            self._excerpts",
    ),
    (
        "the slot of what is dropped while it is written is free at once",
        _TASKS,
        "            return  # its slot and pins are free when the worker has answered\n",
        "            pass\n",
    ),
    (
        "what is made again later does not see blocks that go",
        _TASKS,
        "            task.assembled, task.phase = None, SlabPhase.WAITING\n            self._wait(task)\n",
        "            task.assembled, task.phase = None, SlabPhase.WAITING\n",
    ),
    (
        "what was made too early keeps its slot",
        _TASKS,
        "            self._make_again_later(self._spare(task))\n            slot = take()\n",
        "            pass\n",
    ),
    (
        "what was outgrown keeps its slot",
        _TASKS,
        "        self._free_slot(task)\n        zone = ",
        "        zone = ",
    ),
    (
        "the other batches of a task that is cut are left out",
        _TASKS,
        "        task.stream.tasks.insert(task.stream.tasks.index(task) + 1, after)\n",
        "",
    ),
    (
        "the other batches of a task that is cut come last",
        _TASKS,
        "        task.stream.tasks.insert(task.stream.tasks.index(task) + 1, after)\n",
        "        task.stream.tasks.append(after)\n",
    ),
    (
        "a delivery arena goes while a worker writes into it",
        _TASKS,
        "        if delivery.closing and not delivery.assembling_count:\n",
        "        if delivery.closing:\n",
    ),
    (
        "a block that went is not missed",
        _WAITING,
        "                task.missing.add(number)\n",
        "",
    ),
    (
        "a shared slab goes while it is read",
        _SHARED,
        "if slab.made is not None and not slab.readers]",
        "if slab.made is not None]",
    ),
    (
        "a shared slab goes while it is made",
        _SHARED,
        "if slab.made is not None and not slab.readers]",
        "if not slab.readers]",
    ),
    (
        "the slabs of a group that is gone stay",
        _SHARED,
        "        group.is_closed = True\n        for slab in self.spare():\n",
        "        group.is_closed = True\n        for slab in []:\n",
    ),
    (
        "a slab that is read when its group ends stays",
        _SHARED,
        "        if not slab.readers and slab.group.is_closed:\n",
        "        if False:\n",
    ),
    (
        "blocks stay for slabs that a group has",
        _SHARED,
        "            if self.find(task) is None:\n",
        "            if True:\n",
    ),
    (
        "kept slabs may take all of the arena",
        _SHARED,
        "_ARENA_PARTS = 2\n",
        "_ARENA_PARTS = 1\n",
    ),
    (
        "what is new is kept in place of what is needed sooner",
        _SHARED,
        "if need < mine]",
        "if need > mine]",
    ),
    (
        "a slab of other steps is taken for the same one",
        _SHARED,
        "walk.position_of(task.plan), at.step_stride, len",
        "walk.position_of(task.plan), 1, len",
    ),
    (
        "a block that was fetched is decoded without its bytes being kept",
        _BLOCKS,
        "        elif raw is not None:\n            self._allocator.free(raw.offset)",
        "        elif False:\n            self._allocator.free(raw.offset)",
    ),
    (
        "bytes that are being sent to a neighbour are freed",
        _BLOCKS,
        "        if raw is not None and block.lent:\n",
        "        if raw is not None and block.lent < 0:\n",
    ),
    (
        "restart indexes take room from the one task that needs all of the arena",
        _BLOCKS,
        "if self.is_short or not is_of_use:",
        "if not is_of_use:",
    ),
    (
        "whoever holds too much is not told to copy",
        _RECORDS,
        "        return len(held) > self.slots.layout.held_slots\n",
        "        return False\n",
    ),
)
