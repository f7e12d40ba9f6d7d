"""Finds the first real cause in a training log, and names its fault."""
