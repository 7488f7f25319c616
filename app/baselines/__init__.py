"""Other checkpointing methods behind the protocol of the training loop."""
