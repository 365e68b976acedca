"""One file per loader under test; all follow the contract of base.py."""
