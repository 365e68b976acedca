"""The benchmark and the demo."""
