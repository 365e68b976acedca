"""Jobs, members, leases, generations: a pure state machine and its server."""
