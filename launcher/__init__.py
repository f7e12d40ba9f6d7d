"""Starts the ranks of a run on every node, watches them, and reports how it ended."""
