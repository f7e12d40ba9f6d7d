"""What a forked process does to be a rank."""
