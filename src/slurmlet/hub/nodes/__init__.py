"""Nodes: one for each Slurm partition, one for each host of an allocation."""
