"""What a training log tells: the first real cause among the tracebacks, by name."""
