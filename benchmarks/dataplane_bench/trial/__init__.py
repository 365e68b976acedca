"""One run of one loader: its process, its clock, its memory."""
