"""Whether the nodes are fit for the run: checked before anything starts."""
