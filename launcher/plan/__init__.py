"""What will run, where and how: decided before anything starts."""
