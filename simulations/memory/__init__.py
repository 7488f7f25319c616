"""What is lost with the memory tier when workers, nodes or the cluster die, and what the tier costs."""
