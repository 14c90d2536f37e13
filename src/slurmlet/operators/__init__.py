"""What administrators and power users run beside a cluster, each on the controller kit of `kube/`: a seat for each.

Nothing here is loaded by a user's `up` or `run`.
"""
