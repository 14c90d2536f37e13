"""A recorded queue replayed against a policy, in simulated time: what `slurmlet provision simulate` runs."""
