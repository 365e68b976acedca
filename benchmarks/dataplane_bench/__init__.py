"""What runs Dataplane to show or to measure it."""
