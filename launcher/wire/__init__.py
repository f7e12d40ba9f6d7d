"""What the programs of a run tell each other, and how long each waits."""
