"""What every other room stands on: errors, processes, files, paths, the terminal. Knows nothing of Kubernetes or Slurm."""
