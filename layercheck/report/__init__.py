"""One page about one run, from storage alone."""
