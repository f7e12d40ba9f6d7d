"""The messages between the programs of a run, and how long each program waits."""
