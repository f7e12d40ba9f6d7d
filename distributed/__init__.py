"""The helper of a training script: its place among the ranks, and what follows from that."""
