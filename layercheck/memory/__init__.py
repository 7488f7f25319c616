"""The memory tier: a vault on each node keeps snapshots in shared memory, where they outlive the worker."""
