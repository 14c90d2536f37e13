#!/bin/sh
# A web server behind a NodePort, asked from the job's first host.
#   slurmlet run -N 2 -- sh examples/run/pod-nginx.sh
set -eu
image=${IMAGE:-nginx:1}

kubectl apply -f - <<END
apiVersion: v1
kind: ConfigMap
metadata: {name: web}
data:
  # "user root": inside the pod, where it is you; most sites give you no second user to change to.
  nginx.conf: |
    user root;
    pid /tmp/nginx.pid;
    events {}
    http { server { listen 80; location / { return 200 "Welcome to nginx on \$hostname\n"; } } }
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - name: nginx
        image: $image
        command: [nginx, -c, /conf/nginx.conf, -g, "daemon off;"]
        ports: [{containerPort: 80}]
        readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}
        volumeMounts: [{name: conf, mountPath: /conf}]
      volumes: [{name: conf, configMap: {name: web}}]
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  selector: {app: web}
  ports: [{port: 80}]
END
kubectl rollout status deployment/web --timeout=120s
port=$(kubectl get service web -o jsonpath='{.spec.ports[0].nodePort}')
host=$(kubectl get nodes -o jsonpath='{.items[0].status.addresses[?(@.type=="InternalIP")].address}')
curl --silent --fail --retry 10 --retry-connrefused --retry-delay 1 "http://$host:$port/"
