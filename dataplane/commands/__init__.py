"""The commands of `dataplane`, one per file; `cli.py` is their group."""
