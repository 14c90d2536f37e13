"""The seat of Slurm jobs as Kubernetes objects. Empty yet."""
