"""`dataplane doctor`: find what limits a run on this machine, and what would help."""
