"""Arrow to batch columns: one transform a file."""
