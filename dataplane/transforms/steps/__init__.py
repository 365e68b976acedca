"""Image steps, one in each file; registry.py lists them."""
