"""A user's own torch Dataset: its processes, their memory, and the place of a pass over it."""
