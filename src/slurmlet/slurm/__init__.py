"""The only room that talks to Slurm."""
