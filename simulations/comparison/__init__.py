"""What each method costs on this machine, side by side: `python -m simulations.measure methods`."""
