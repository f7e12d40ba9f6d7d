"""The node agent: forks the ranks of one node, watches them, and agrees with the others."""
