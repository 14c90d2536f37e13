#!/bin/sh
# Training on several nodes: an indexed Job, one worker per node, which find each other by name as PyTorch's do
# (MASTER_ADDR, RANK, WORLD_SIZE). Here each only says who it is; put your program in place of the script.
#   slurmlet run -N 3 -- sh examples/run/job-training.sh
set -eu
image=${IMAGE:-busybox:1}
workers=${WORKERS:-$(kubectl get nodes -o name | wc -l)}

kubectl apply -f - <<END
apiVersion: v1
kind: Service
metadata: {name: train}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {job-name: train}
---
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec:
  completions: $workers
  parallelism: $workers
  completionMode: Indexed
  backoffLimit: 0
  template:
    spec:
      subdomain: train
      restartPolicy: Never
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
          - topologyKey: kubernetes.io/hostname
            labelSelector: {matchLabels: {job-name: train}}
      containers:
      - name: worker
        image: $image
        env:
        - {name: MASTER_ADDR, value: train-0.train.default.svc.cluster.local}
        - {name: WORLD_SIZE, value: "$workers"}
        command:
        - sh
        - -c
        - |
          mkdir -p /tmp/www; echo welcome > /tmp/www/index.html
          if [ "\$JOB_COMPLETION_INDEX" = 0 ]; then httpd -p 29500 -h /tmp/www; fi
          until wget -qO /dev/null "http://\$MASTER_ADDR:29500/"; do sleep 0.2; done
          echo "rank \$JOB_COMPLETION_INDEX of \$WORLD_SIZE on \$(hostname) met its master"
          # The master stays until all have met it, as a process group's does.
          if [ "\$JOB_COMPLETION_INDEX" = 0 ]; then sleep 20; fi
END
kubectl wait --for=condition=complete job/train --timeout=300s
kubectl logs -l job-name=train --tail=-1
