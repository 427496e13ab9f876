"""One page a file: controls and order, nothing else."""
