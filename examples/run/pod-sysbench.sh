#!/bin/sh
# A CPU benchmark in one pod that gets all CPUs of its node. Needs an image with sysbench.
#   slurmlet run -c 8 --image sysbench.tar -- sh examples/run/pod-sysbench.sh
set -eu
image=${IMAGE:-severalnines/sysbench}
threads=${SLURM_CPUS_ON_NODE:-1}

kubectl run sysbench --image="$image" --restart=Never --command -- \
    sysbench cpu --threads="$threads" --cpu-max-prime=20000 run
kubectl wait --for=jsonpath='{.status.phase}'=Succeeded pod/sysbench --timeout=600s
kubectl logs sysbench
