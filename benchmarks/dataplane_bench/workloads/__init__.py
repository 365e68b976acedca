"""The samples to load: generated ones, or the user's own."""
