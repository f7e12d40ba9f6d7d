"""The containers in which a node's Python can run: one file for each runtime."""
