"""A pod's containers: from the plan to a process, probes, restarts, ends."""
