"""Runs whose process is killed again and again: what their weights were, and what came back of them."""
