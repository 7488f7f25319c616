"""Checkpoints in the memory of two hosts, after GEMINI (SOSP'23)."""
