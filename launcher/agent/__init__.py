"""The node agent: forks and watches a node's ranks; all agents agree on the outcome."""
