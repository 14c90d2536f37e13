#!/bin/sh
# The Kubernetes API without kubectl: address, token and CA are in the environment.
#   slurmlet run -N 2 -- sh examples/run/kube-api.sh
set -eu

# From a file, not an argument: other users of the host can read a command line.
printf 'header = "Authorization: Bearer %s"\n' "$K8S_CLUSTER_API_TOKEN" |
    curl --silent --fail --config - --cacert "$K8S_CLUSTER_CA" "$K8S_CLUSTER_API/api/v1/nodes" |
    grep -o '"kubernetes.io/hostname": *"[^"]*"'
