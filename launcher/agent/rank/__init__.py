"""What a forked process does to become a rank."""
