"""slurmlet: your own Kubernetes on any Slurm cluster, without root."""

__version__ = "0.1.0"
