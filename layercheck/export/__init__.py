"""The composite of a store as a checkpoint that others read."""
