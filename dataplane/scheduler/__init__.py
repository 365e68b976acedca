"""Decide what a node loads, makes and hands over next: events in, effects out. Pure.

The door: `scheduler` (the decisions), `events` (what goes in and out), `records` and `dataset`
(values), `walk`; `budgets`, `planning` and `stalls` for errors and estimates; `autoscaler` and
`in_flight` decide how many workers and fetchers there are.
"""
