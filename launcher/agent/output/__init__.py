"""The ranks' output, on its way to the node logs and the terminal."""
