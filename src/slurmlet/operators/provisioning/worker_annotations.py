"""The marks that the operator leaves on Machines and pods, and those of others that it reads.

What a step has done is written here, on the object it is about, and nowhere else: whoever takes over goes on from these.
"""

from __future__ import annotations

# Slurm's name of the worker, where it is not that of the Machine. Power saving gives out names of CLOUD nodes this way.
SLURM_NODE = "slurmlet.io/slurm-node"
# When Slurm was first seen to know the worker.
REGISTERED = "slurmlet.io/registered-at"
# Set by us together with the mark by which a target's controller takes this one first.
SCALE_IN = "slurmlet.io/scale-in"
# When the wait for jobs of a Machine that is to go began.
DRAINING_SINCE = "slurmlet.io/draining-since"
# A person lets a Machine go though Slurm does not answer, or jobs run: "true".
SKIP_DRAIN = "slurmlet.io/skip-drain"

# Cluster API: taken first when replicas are lowered; and the hooks under which a Machine waits before it is taken apart.
# A Machine that no Kubernetes Node stands for, as a Slurm worker's, never waits for pre-drain hooks, only for the other.
DELETE_MACHINE = "cluster.x-k8s.io/delete-machine"
PRE_TERMINATE_HOOK = "pre-terminate.delete.hook.machine.cluster.x-k8s.io/slurmlet"
PRE_DRAIN_HOOK = "pre-drain.delete.hook.machine.cluster.x-k8s.io/slurmlet"
HOOKS = (PRE_DRAIN_HOOK, PRE_TERMINATE_HOOK)
HOOK_OWNER = "slurmlet-provision"
# The thesis's own, without a name behind it: it is taken off together with ours.
OLD_PRE_DRAIN_HOOK = "pre-drain.delete.hook.machine.cluster.x-k8s.io"
# Pods: taken first when replicas are lowered, by the controllers of Kubernetes and by Slinky's.
POD_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
SLINKY_DELETION_COST = "nodeset.slinky.slurm.net/pod-deletion-cost"
SLINKY_HOSTNAME = "nodeset.slinky.slurm.net/pod-hostname"
FIRST_TO_GO = "-2147483648"

# Whose a Machine is: kept on it, since its WorkerSet may be deleted before it.
WORKER_SET = "slurmlet.io/worker-set"
SLURM_CLUSTER = "slurmlet.io/slurm-cluster"

# On a WorkerSet: which address of a pod Slurm is to know it by, "PodIP" (default) or "HostIP".
NODE_ADDRESS = "slurmlet.io/node-address"
# On a WorkerSet that Slurm's power saving drives: the CLOUD nodes that it stands for, and those that are to be on, as
# Slurm writes lists of hosts.
POWER_SAVING_NODES = "slurmlet.io/power-saving-nodes"
POWERED_ON = "slurmlet.io/powered-on"
