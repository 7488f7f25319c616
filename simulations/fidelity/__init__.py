"""Is training after composite recoveries as good as without a failure? `python -m simulations.fidelity`."""
