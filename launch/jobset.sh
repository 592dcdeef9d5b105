#!/usr/bin/env bash
# Prints a JobSet for GKE that runs a program on a TPU slice or on GPUs, starts it
# again after an interruption, and ends with it; see launch/CONTAINERS.md.
#
#   TYPE=v6e-16 IMAGE=… [NAME=tepo] [SPOT=1] [ACCOUNT=…] \
#     launch/jobset.sh [PROGRAM] --config=… --workdir=gs://… | kubectl apply -f -
#
# TYPE is one of launch/tpu_vm.sh types, tpu7x-N (N/2 chips), or GPUs as in
# tepo_jax.plan: h100x8, h200x8, a100-80x1, h100x2x8 (two machines). ACCOUNT is a
# Kubernetes service account that may use the bucket; without one, pods act as the
# node pool's service account of Google's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
source launch/tpu_types.sh
# A stopped run prints this as the command that resumes.
again="$(command_line 'TYPE IMAGE NAME SPOT ACCOUNT' launch/jobset.sh "$@") \
| kubectl apply -f -"
fail() { echo "launch/jobset.sh: error: $*" >&2; exit 2; }

program=train name=${NAME:-tepo}
if [[ ${1:-} =~ ^(train|evaluate|export|pretrain|benchmark|report)$ ]]; then
  program=$1; shift
fi
[[ -n ${TYPE:-} && -n ${IMAGE:-} && $# -gt 0 ]] \
  || fail "usage: TYPE=v6e-16 IMAGE=… launch/jobset.sh [PROGRAM] ARGUMENTS"

# Prints words as YAML strings.
q="'"  # bash before 4.3 would keep the backslashes of \'
quoted() { for word; do printf "'%s', " "${word//$q/$q$q}"; done; }
env="
              - {name: PYTHONUNBUFFERED, value: '1'}
              - {name: TEPO_COMMAND, value: '${again//$q/$q$q}'}
              - {name: TEPO_REMARK, value: 'unless the JobSet starts it again'}"
if [[ $TYPE =~ ^(h100|h200|a100-80)x(([0-9]+)x)?([1-8])$ ]]; then
  hosts=${BASH_REMATCH[3]:-1} count=${BASH_REMATCH[4]} resource=nvidia.com/gpu
  label=${BASH_REMATCH[1]/200/200-141}
  privileged=false
  selectors="cloud.google.com/gke-accelerator: nvidia-${label/h100/h100-80}gb"
  command="'launch/gpu.sh', '$program'"
  [[ $hosts -eq 1 ]] || env+="
              - {name: JAX_COORDINATOR_ADDRESS, value: '$name-host-0-0.$name:12355'}
              - {name: JAX_NUM_PROCESSES, value: '$hosts'}
              - name: JAX_PROCESS_ID
                valueFrom: {fieldRef: {fieldPath: \"metadata.annotations[\
'batch.kubernetes.io/job-completion-index']\"}}"
elif topology=$(gke_topology); then
  # jax reads TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, which GKE sets.
  hosts=$(hosts) count=$(($(chips) / $(hosts))) resource=google.com/tpu
  selectors="cloud.google.com/gke-tpu-accelerator: $(gke_accelerator)
              cloud.google.com/gke-tpu-topology: $topology"
  command="'.venv/bin/python', '-m', 'tepo_jax.$program'"
  privileged=true  # else libtpu may lock too little memory
  env+="
              - {name: JAX_PLATFORMS, value: 'tpu,cpu'}
              - {name: TEPO_MULTIHOST, value: '$((hosts > 1))'}"
else
  fail "TYPE=$TYPE: must be one slice of launch/tpu_vm.sh types, or GPUs like h100x8"
fi
# On the nodes' own network GKE has no Workload Identity.
network='hostNetwork: true
            dnsPolicy: ClusterFirstWithHostNet'
[[ -z ${ACCOUNT:-} ]] || network="serviceAccountName: $ACCOUNT"
[[ -z ${SPOT:-} ]] || selectors+='
              cloud.google.com/gke-spot: "true"'

cat <<YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: 20
    rules:  # what podFailurePolicy finds is not started again
    - {name: failed, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}
  replicatedJobs:
  - name: host
    replicas: 1
    template:
      spec:
        completions: $hosts
        parallelism: $hosts
        completionMode: Indexed
        backoffLimit: 0
        podFailurePolicy:
          rules:  # 3, 42 and signals (127 to 255) are started again
          - action: FailJob
            onExitCodes: {containerName: tepo, operator: In, values: [1, 2]}
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 600
            $network
            nodeSelector:
              $selectors
            tolerations:
            - {key: $resource, operator: Exists, effect: NoSchedule}
            - {key: cloud.google.com/gke-spot, operator: Exists}
            containers:
            - name: tepo
              image: $IMAGE
              securityContext: {privileged: $privileged}
              command: [$command, $(quoted "$@")]
              env:$env
              envFrom:  # HF_TOKEN, WANDB_API_KEY, …
              - secretRef: {name: tepo-secrets, optional: true}
              resources: {limits: {$resource: $count}}
              volumeMounts: [{name: shm, mountPath: /dev/shm}]
            volumes: [{name: shm, emptyDir: {medium: Memory}}]
YAML
