"""The node agent: forks and watches one node's ranks, and agrees on the outcome with the others."""
