"""Everything that knows Ray, but for the trainer."""
