"""What a training script imports: process groups, checkpoints, stops and heartbeats."""

__version__ = "0.2.0"
