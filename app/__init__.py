"""The post-training application: supervised fine-tuning under ZeRO-3."""
