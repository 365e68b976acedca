"""Decide what a node loads, makes and hands over next: events in, effects out. Pure."""
