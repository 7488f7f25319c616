"""From a plan to live state: fetch, install."""
