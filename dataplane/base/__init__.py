"""Basics that every process needs: logs, memory, threads, compiled code, units."""
