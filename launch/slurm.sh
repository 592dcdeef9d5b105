#!/usr/bin/env bash
#SBATCH --job-name=tepo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
# Runs a program under Slurm until it ends: five minutes before the time is over
# it saves and exits with status 42, and the job is queued again, at most 20
# times. The output is in slurm-JOBID.out.
#
#   sbatch [--nodes=N --time=T --partition=P …] launch/slurm.sh \
#     --config=configs/qwen2_5_7b.py:tepo --workdir=runs/qwen
#   CONTAINER=IMAGE sbatch … launch/slurm.sh ARGUMENTS
#     in an image of launch/Dockerfile, by pyxis; runs/ is this folder's
#   touch runs/stop.JOBID && scancel --signal=TERM JOBID
#     makes the run save and exit; the job is not queued again
#
# Submit it in the repository's folder, which all nodes must share, after
# CUDA=13 launch/setup.sh gpu (12 for drivers before 580). ARGUMENTS are those of
# launch/gpu.sh. For a task per node, --ntasks-per-node=1.
set -euo pipefail
# Under Slurm this script is a copy in another folder.
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"
source launch/common.sh
: "${SLURM_SUBMIT_DIR:?unset: submit this script by sbatch}"

mkdir -p runs
container=()
[[ -z ${CONTAINER:-} ]] || container=(
  --container-image="$CONTAINER" --container-workdir=/tepo
  --container-mounts="$PWD/runs:/tepo/runs")
TEPO_COMMAND=$(command_line CONTAINER 'sbatch launch/slurm.sh' "$@")
# A stopped run prints this as the command that resumes.
export TEPO_COMMAND TEPO_REMARK="with your options of sbatch, unless Slurm queues the \
job again"
# Since Slurm 22.05 srun does not take --cpus-per-task from sbatch.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
status=0
# srun's status is its tasks' highest. If one fails with 1 or 2, which are errors
# that remain, the others end with 3, for a lost process: its status becomes
# higher than theirs.
# Slurm signals only this bash, which passes SIGTERM on and waits for the save:
# what is left when it ends is killed.
# shellcheck disable=SC2016  # the task's bash is meant
srun ${container[@]+"${container[@]}"} bash -c '
trap "kill -TERM \$child 2>/dev/null" TERM
launch/gpu.sh "$@" & child=$! status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do status=0; wait "$child" || status=$?; done
exit $(( status == 1 || status == 2 ? status + 250 : status ))' task "$@" \
  || status=$?
(( status <= 250 )) || status=$((status - 250))
if [[ -e runs/stop.$SLURM_JOB_ID ]]; then
  rm "runs/stop.$SLURM_JOB_ID"
elif (( status > 2 && ${SLURM_RESTART_COUNT:-0} < 20 )); then
  echo "launch/slurm.sh: status $status: queued again" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
