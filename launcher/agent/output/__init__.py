"""What the ranks print, on its way to the node logs and the terminal."""
