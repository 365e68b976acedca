"""Read bytes from object stores."""
