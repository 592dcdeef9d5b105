#!/usr/bin/env bash
# Sets up, and runs train, evaluate, export, pretrain, benchmark or report on GPUs.
#
#   launch/gpu.sh --config=configs/tiny.py:tepo --workdir=DIR [--config.FIELD=…]
#   launch/gpu.sh PROGRAM ARGUMENTS
#
# On one machine it runs one process for all GPUs. On several machines, which
# must share this folder and be able to write to --workdir:
#
#   HOSTS='host1 host2' launch/gpu.sh ARGUMENTS
#     starts a process on each host by ssh, with your NCCL_… and XLA_… variables,
#     and returns; the output goes to train.0.log, train.1.log, …; DRY_RUN=1
#     prints the ssh commands instead
#   HOSTS='host1 host2' launch/gpu.sh stop
#     makes that run save and exit
#   srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 launch/gpu.sh ARGUMENTS
#     under Slurm, with a task per GPU, or per node; see launch/slurm.sh
#
# A relative --workdir is relative to the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh

fail() { echo "launch/gpu.sh: error: $*" >&2; exit 2; }

# Prints the command that starts process $1 of the job, for ssh.
start_command() {
  local variables name
  variables="JAX_COORDINATOR_ADDRESS=${hosts[0]#*@}:${PORT:-12355} \
JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$1"
  variables+=" TEPO_COMMAND=$(printf %q \
    "$(command_line 'HOSTS PORT' launch/gpu.sh "${@:2}")")"
  for name in $(compgen -e | grep -E '^(NCCL|XLA)_' || true); do
    variables+=" $name=$(printf %q "${!name}")"
  done
  echo "if $(in_progress "$1"); then \
echo launch/gpu.sh: error: a run is in progress here: stop it first >&2; exit 2; fi; \
cd $(printf %q "$PWD") && { $variables nohup launch/supervise.sh \
launch/gpu.sh $(printf '%q ' "${@:2}")>>train.$1.log 2>&1 </dev/null & \
echo \$! >train.$1.pid; }"
}

# Prints the number of process $1 of the job, and whether it is in progress, as
# commands for ssh. By name: another process may have the number of one that has ended.
number() { echo "\$(cat $(printf %q "$PWD")/train.$1.pid 2>/dev/null)"; }
in_progress() { echo "grep -qsa launch/supervise.sh /proc/$(number "$1")/cmdline"; }

# Runs on each of HOSTS by ssh what start_command says, or stops it.
on_hosts() {
  local id command status=0
  for id in "${!hosts[@]}"; do
    if [[ $1 == stop ]]; then
      command="if $(in_progress "$id"); then \
kill -TERM $(number "$id"); else echo no run is in progress; fi"
    else
      command=$(start_command "$id" "$@")
    fi
    if [[ -n ${DRY_RUN:-} ]]; then
      printf '%q ' ssh "${hosts[$id]}" "$command"; echo
    else
      # shellcheck disable=SC2029  # this id and these arguments are meant
      ssh "${hosts[$id]}" "$command" || {
        status=$?
        if [[ $1 != stop ]]; then not_started "$id"; break; fi
        echo "launch/gpu.sh: ${hosts[$id]} is not stopped" >&2; }
    fi
  done
  return "$status"
}

# Names the host that process $1 of the job is for, and how to stop those before it.
not_started() {
  echo "launch/gpu.sh: not started on ${hosts[$1]}" >&2
  [[ $1 -eq 0 ]] || echo "launch/gpu.sh: the other hosts' processes wait for it:" \
    "HOSTS='${hosts[*]:0:$1}' launch/gpu.sh stop" >&2
}

# Prints this task's GPUs, such as 2,3, as jax counts them: in a step of several
# tasks jax would take one, by the task's number on its node. A task sees its own
# with --gpus-per-task, else all GPUs of the node, which the node's tasks share.
gpus_of_task() {
  local count tasks first=0
  if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    count=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
  else
    count=$(nvidia-smi -L | wc -l)
  fi
  if [[ -z ${SLURM_GPUS_PER_TASK:-} \
      && ${SLURM_TRES_PER_TASK:-} != *gpu* ]]; then
    tasks=${SLURM_STEP_TASKS_PER_NODE%%[(,]*}
    (( tasks <= count )) || fail "$tasks tasks of a node and $count GPUs:" \
      "take one task per GPU or per node"
    count=$((count / tasks)) first=$((SLURM_LOCALID * count))
  fi
  seq -s, "$first" $((first + count - 1))
}

if [[ -n ${HOSTS:-} ]]; then
  read -ra hosts <<<"$HOSTS"
  on_hosts "$@"
  exit
fi

# A stopped run prints this as the command that resumes.
export TEPO_COMMAND=${TEPO_COMMAND:-$(command_line '' launch/gpu.sh "$@")}
program=train
if [[ ${1:-} =~ ^(train|evaluate|export|pretrain|benchmark|report)$ ]]; then
  program=$1; shift
fi

# The tasks of a machine run this one after another; the first installs.
flock launch/setup.sh launch/setup.sh gpu
# Slurm's variables are there also without srun: in sbatch, salloc, a notebook.
if (( ${SLURM_STEP_NUM_TASKS:-1} > 1 )); then
  JAX_LOCAL_DEVICE_IDS=$(gpus_of_task)
  export TEPO_MULTIHOST=1 JAX_LOCAL_DEVICE_IDS
elif [[ -n ${JAX_COORDINATOR_ADDRESS:-} ]]; then
  export TEPO_MULTIHOST=1
fi
# XLA preallocates this share of the memory (its default is 0.75). The rest is
# for CUDA, cuDNN and NCCL. JAX refuses this name beside the older one.
[[ -n ${XLA_PYTHON_CLIENT_MEM_FRACTION:-} ]] \
  || export XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-0.92}
# Overlap gathering the next layer's weights with computing this one.
export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true \
${XLA_FLAGS:-}"
exec env JAX_PLATFORMS=cuda,cpu .venv/bin/python -m "tepo_jax.$program" "$@"
