"""The ground that any process of ours stands on: logs, memory, threads, compiled code, units."""
