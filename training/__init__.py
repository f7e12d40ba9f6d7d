"""What train.py uses: settings, batches, progress, resuming, and the tasks it can train."""
