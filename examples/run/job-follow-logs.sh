#!/bin/sh
# A Job, its logs while it runs, its exit code as the Slurm job's.
#   slurmlet run -- sh examples/run/job-follow-logs.sh
set -eu
image=${IMAGE:-busybox:1}

kubectl create job count --image="$image" -- sh -c 'for i in 1 2 3 4 5; do echo "step $i"; sleep 1; done'
kubectl wait --for=jsonpath='{.status.ready}'=1 job/count --timeout=120s
kubectl logs --follow job/count
kubectl wait --for=condition=complete job/count --timeout=60s
