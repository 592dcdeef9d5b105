#!/usr/bin/env bash
# Sets up a laptop, makes the tiny base model, trains it, and prints accuracy
# before and after. Run it again to resume an interrupted run.
#
#   [METHOD=tepo] [SEED=0] [WORKDIR=DIR] launch/local.sh [--config.FIELD=VALUE]
#
# A relative WORKDIR is relative to the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
launch/setup.sh cpu
method=${METHOD:-tepo} seed=${SEED:-0}
# A stopped run prints this as the command that resumes.
TEPO_COMMAND=$(command_line 'METHOD SEED WORKDIR' launch/local.sh "$@")
export TEPO_COMMAND
exec env JAX_PLATFORMS=cpu .venv/bin/python -m tepo_jax.train \
  --config="configs/tiny.py:$method" --config.seed="$seed" \
  --workdir="${WORKDIR:-runs/tiny_${method}_$seed}" "$@"
