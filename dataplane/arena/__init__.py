"""The memory: memfds, allocation, slab states.

The door: `memfd` is the memory, `pages` its pages, `forks` who can still read it after a fork.
`allocator` and `slots` decide who holds which part, and `slab_layout` what lies in a slab.
"""
