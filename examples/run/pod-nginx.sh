#!/bin/sh
# A web server behind a NodePort, asked from the job's first host.
#   slurmlet run -N 2 -- sh examples/run/pod-nginx.sh
set -eu
image=${IMAGE:-nginx:1}

kubectl create deployment web --image="$image" --replicas=2
kubectl expose deployment web --port=80 --type=NodePort
kubectl rollout status deployment/web --timeout=120s
port=$(kubectl get service web -o jsonpath='{.spec.ports[0].nodePort}')
host=$(kubectl get nodes -o jsonpath='{.items[0].status.addresses[?(@.type=="InternalIP")].address}')
curl --silent --fail --retry 10 --retry-connrefused --retry-delay 1 "http://$host:$port/"
