"""The steps that make pixels of encoded images, one a file; registry.py lists them."""
