"""`slurmlet provision`: Slurm workers made, joined, scaled and retired from Kubernetes."""
