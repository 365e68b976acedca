"""Which samples, in what order, for whom. Pure: no clock, no I/O, no threads."""
