"""The helper of a training script: its place among the ranks, and what follows from that."""

__version__ = "0.1.0"
