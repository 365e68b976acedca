"""Reports of a run: as a table, as JSON, as a page, and compared with an older run."""
