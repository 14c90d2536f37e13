"""The runner: starts in every Slurm job, runs one pod there, dies with the job.

Stands alone, with the packages below it (`podnet`, `protocol`, `linux`): standard library only, Python ≥ 3.9. All of
them, `agent` and `entrypoint` too, travel to compute nodes as one file, runner.pyz.
"""

# Said to the hub. Spelled here because nothing above these packages travels with the runner; a test keeps it in step.
VERSION = "0.1.0"
