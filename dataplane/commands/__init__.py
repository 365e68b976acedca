"""The commands of `dataplane`, one a file; `cli.py` is their group."""
