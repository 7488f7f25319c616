"""The simulation against reality: runs whose workers are killed, on the local cluster."""
