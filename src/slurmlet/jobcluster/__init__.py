"""`slurmlet run`: a whole cluster inside one Slurm job, gone when its command ends."""
