"""Jobs, members, leases, generations: a pure state machine and its server.

The door: `server` serves a cluster, and `front` an embedded node in its own process.
"""
