"""What train.py stands on: settings, progress, and the tasks it can train."""
