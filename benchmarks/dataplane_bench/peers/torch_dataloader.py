"""torch.utils.data.DataLoader: a map-style Dataset over a memory-mapped array, batch by batch or row by row."""
