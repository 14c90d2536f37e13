"""exec, attach, port-forward and logs: streams over the link to the hub."""
