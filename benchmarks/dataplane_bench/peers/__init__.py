"""One file a loader under test; all keep the contract of base.py."""
