"""A user's own torch Dataset: its worker processes, their memory, and the position of a pass."""
