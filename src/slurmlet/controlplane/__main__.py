"""`python -m slurmlet.controlplane <cluster dir> <binaries dir>`: the supervisor, started by `slurmlet up`."""

from slurmlet.controlplane.supervisor import run_as_program

if __name__ == "__main__":
    run_as_program()
