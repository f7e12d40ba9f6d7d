"""The agents of all nodes together: they meet, hold connections, and replace lost nodes."""
