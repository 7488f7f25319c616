"""Two engines that must agree: an event-driven reference and vectorised segments."""
