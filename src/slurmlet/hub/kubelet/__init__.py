"""The HTTP APIs the hub answers: a kubelet's for every node, and the metrics API. Certificates first, then anything else."""
