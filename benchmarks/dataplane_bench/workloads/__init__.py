"""What is loaded: generated sets of samples, or the user's own."""
