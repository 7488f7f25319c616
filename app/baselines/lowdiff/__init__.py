"""LowDiff: the compressed gradients of every step are the differential checkpoints."""
