"""Compute which samples each rank reads, in which order. Pure: no clock, no I/O, no threads.

The door: `order` and `orders`, `slices`, `manifest`, `mixture`, `packs`, `tombstones`, `views`;
values in `windows`.
"""
