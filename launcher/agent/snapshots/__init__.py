"""Snapshots of the ranks' state, in memory that outlives the ranks."""
