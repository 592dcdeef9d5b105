#!/usr/bin/env bash
# NVIDIA GPUs: sets up and trains; arguments go to the program.
#
#   launch/gpu.sh --config=configs/tiny.py:tepo --workdir=DIR [--config.FIELD=…]
#
# On one machine: one process on all its GPUs, here and now. On several, which
# all have this folder and a --workdir that all can write to:
#
#   HOSTS='host1 host2' launch/gpu.sh ARGUMENTS   starts it on each by ssh, and
#                       returns; the output is in train.0.log, train.1.log, …
#   srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 launch/gpu.sh ARGUMENTS
#                       under Slurm, a task a GPU
#
# A relative --workdir lies in the repository. DRY_RUN=1 prints the commands of
# HOSTS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

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

# Tasks of one machine take turns; the first sets up.
flock launch/setup.sh launch/setup.sh gpu
[[ -z ${SLURM_JOB_ID:-}${JAX_COORDINATOR_ADDRESS:-} ]] \
  || export TEPO_MULTIHOST=1
# XLA takes memory once, up to this share; by default three quarters. What is
# left is for CUDA, cuDNN and NCCL.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
# Gather the next layer's weights while this one computes.
export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true \
${XLA_FLAGS:-}"
exec env JAX_PLATFORMS=cuda,cpu .venv/bin/python -m tepo_jax.train "$@"
