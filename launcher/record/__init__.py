"""What a run leaves behind: its folder, run.json, and the list of runs."""
