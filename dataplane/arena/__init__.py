"""The memory: memfds, allocation, slab states."""
