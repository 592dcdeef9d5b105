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
#     starts a process on each host by ssh and returns; the output goes to
#     train.0.log, train.1.log, …; DRY_RUN=1 prints the ssh commands instead
#   srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 launch/gpu.sh ARGUMENTS
#     under Slurm, with one task per GPU
#
# A relative --workdir is relative to the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  sed -n '2,/^set /{s/^# \{0,1\}//p}' launch/gpu.sh
  exit
fi

if [[ -n ${HOSTS:-} ]]; then
  read -ra hosts <<<"$HOSTS"
  for id in "${!hosts[@]}"; do
    command="cd $(printf '%q' "$PWD") && \
JAX_COORDINATOR_ADDRESS=${hosts[0]}:${PORT:-12355} \
JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$id nohup \
launch/supervise.sh launch/gpu.sh $(printf '%q ' "$@")>>train.$id.log 2>&1 \
</dev/null &"
    if [[ -n ${DRY_RUN:-} ]]; then
      printf '%q ' ssh "${hosts[$id]}" "$command"; echo
    else
      # shellcheck disable=SC2029  # this id and these arguments are meant
      ssh "${hosts[$id]}" "$command"
    fi
  done
  exit
fi

program=train
if [[ ${1:-} =~ ^(train|evaluate|export|pretrain|benchmark|report)$ ]]; then
  program=$1; shift
fi

# The tasks of a machine run this one after another; the first installs.
flock launch/setup.sh launch/setup.sh gpu
[[ -z ${SLURM_JOB_ID:-}${JAX_COORDINATOR_ADDRESS:-} ]] \
  || export TEPO_MULTIHOST=1
# XLA preallocates this share of the memory (its default is 0.75). The rest is
# for CUDA, cuDNN and NCCL.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
# Overlap gathering the next layer's weights with computing this one.
export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true \
${XLA_FLAGS:-}"
exec env JAX_PLATFORMS=cuda,cpu .venv/bin/python -m "tepo_jax.$program" "$@"
