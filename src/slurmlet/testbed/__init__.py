"""A real multi-host Slurm on one machine, out of namespaces. Needs root; the product never does."""
