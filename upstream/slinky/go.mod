module slurmlet.io/upstream/slinky

go 1.26.0

require github.com/SlinkyProject/slurm-operator v1.0.0
