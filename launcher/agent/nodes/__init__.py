"""How the agents of all nodes meet, stay connected, and replace lost nodes."""
