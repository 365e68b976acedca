"""Metrics for Prometheus: the table of all metrics, and the port that serves them. The door:
`table.py` (names and readings), `server.py` (the port). Each room keeps its own counts
(base/meters.py); a node reads them in node/heartbeat.py, a coordinator in coordinator/view.py.
"""
