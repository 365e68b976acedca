"""Convert Arrow columns to batch columns: one transform a file."""
