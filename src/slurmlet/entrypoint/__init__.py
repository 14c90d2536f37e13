"""How a process in a Slurm job begins: runner.pyz and its subcommands."""
