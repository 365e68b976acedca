"""`dataplane doctor`: what bounds a run on this machine, and what would help."""
