"""Check, before anything starts, that the nodes are fit for the run."""
