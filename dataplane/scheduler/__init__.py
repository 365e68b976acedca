"""Decide what a node loads, makes and hands over next: events in, effects out. Pure.

The door: `scheduler` (the decisions), `events` (what goes in and out), `records` and `dataset`
(values), `walk`.
"""
