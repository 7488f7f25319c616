"""Who committed what: plan, journal, coordinator."""
