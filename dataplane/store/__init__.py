"""Reads bytes from object stores."""
