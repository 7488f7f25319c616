"""Runs on a private cluster whose workers, nodes or whole cluster are killed; the memory tier in steps."""
