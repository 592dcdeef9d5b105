#!/usr/bin/env bash
#SBATCH --job-name=tepo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
# Runs a program under Slurm, again and again until it ends: five minutes before
# the time is over it saves and exits with status 42, and the job is queued again.
#
#   sbatch [--nodes=N --time=T --partition=P …] launch/slurm.sh \
#     --config=configs/qwen2_5_7b.py:tepo --workdir=runs/qwen
#   CONTAINER=IMAGE sbatch … launch/slurm.sh ARGUMENTS
#     in an image of launch/Dockerfile, by pyxis; runs/ is this folder's
#
# Submit it in the repository's folder, which all nodes must share, after
# CUDA=13 launch/setup.sh gpu (12 for drivers before 580). ARGUMENTS are those of
# launch/gpu.sh. For a task per node, --ntasks-per-node=1.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"  # this script is a copy in another folder

container=()
[[ -z ${CONTAINER:-} ]] || container=(
  --container-image="$CONTAINER" --container-workdir=/tepo
  --container-mounts="$PWD/runs:/tepo/runs")
status=0
srun "${container[@]}" launch/gpu.sh "$@" || status=$?
# 1 and 2 are errors, which remain. srun's status is its tasks' highest.
if (( status > 2 && ${SLURM_RESTART_COUNT:-0} < 20 )); then
  echo "launch/slurm.sh: status $status: queued again" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
