"""The hub: one process that is every node's kubelet. Stateless: it rebuilds all from the API server, Slurm and runners."""
