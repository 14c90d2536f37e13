"""The Injection Webhook: a new machine's metadata get the address of its Slurm controller and the key to join it."""
