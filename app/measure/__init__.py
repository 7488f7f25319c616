"""Measuring runs: the same training step, timed inside, on a few ranks without Ray."""
