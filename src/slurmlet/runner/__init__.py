"""The runner: starts in every Slurm job, runs one pod there, dies with the job.

Stands alone: standard library only, Python ≥ 3.9, imports nothing of slurmlet outside this folder. The hub imports
`wire` and `logfiles` from here so that the protocol and the log format each exist once.
"""

# Said to the hub. Spelled here because nothing above this folder travels with the runner; a test keeps it in step.
VERSION = "0.1.0"
