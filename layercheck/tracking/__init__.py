"""Measuring the drift of layers and deciding which to save."""
