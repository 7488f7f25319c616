"""Adapters for training frameworks."""
