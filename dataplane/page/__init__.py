"""The live page that a service shows in a browser. The door: `server.py` (the page's paths at the
metrics port), `figures.py` (the figures of the page, also used by `dataplane status`).
"""
