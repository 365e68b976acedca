"""Metrics for Prometheus: the table of all of them, and the port that shows them. Its door:
`table.py` (names and readings), `server.py` (the port). Rooms keep the counts themselves
(base/meters.py); a node reads them in node/heartbeat.py, a coordinator in coordinator/view.py.
"""
