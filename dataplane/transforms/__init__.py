"""Convert Arrow columns to the columns of batches, and encoded images to pixels."""
