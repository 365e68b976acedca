"""Compute which samples each rank reads, in which order. Pure: no clock, no I/O, no threads."""
