"""Fine-tuning runs that fail and recover, in one process: what composite recoveries do to the result."""
