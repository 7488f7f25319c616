"""What saving costs, measured on this machine: `python -m simulations.measure saving`."""
