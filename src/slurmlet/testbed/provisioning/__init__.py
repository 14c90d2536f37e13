"""The real parts that `slurmlet provision` is tried with: a management cluster, Cluster API, machines that boot."""
