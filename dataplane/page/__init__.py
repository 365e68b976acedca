"""The live page that a service shows in a browser. Its door: `server.py` (its paths at the port of
metrics), `figures.py` (what it shows, in the form of `dataplane status`).
"""
