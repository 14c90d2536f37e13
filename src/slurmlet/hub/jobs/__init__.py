"""Slurm's jobs as the hub knows them."""
