"""The worker bootstrap provider of Cluster API: what a new machine is told to become a Slurm worker."""
