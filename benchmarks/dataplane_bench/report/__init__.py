"""What was measured, as a table, as JSON, as a page, and against an older run."""
