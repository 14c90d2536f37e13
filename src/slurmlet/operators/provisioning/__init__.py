"""The seat of `slurmlet provision`: Slurm workers made, joined, scaled and retired from Kubernetes. Empty yet."""
