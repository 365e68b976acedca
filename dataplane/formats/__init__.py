"""Bytes to Arrow: one format a file."""
