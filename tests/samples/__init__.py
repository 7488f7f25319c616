"""Small samples in the public schemas, written for this project."""

from pathlib import Path

MEDQA = Path(__file__).with_name("medqa.jsonl")
OPENTHOUGHTS = Path(__file__).with_name("openthoughts.jsonl")
