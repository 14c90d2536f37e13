"""Allocation nodes: hosts of running Slurm allocations on which pods start at once, without a queue."""
