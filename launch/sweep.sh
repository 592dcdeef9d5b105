#!/usr/bin/env bash
# Many runs on the embedded task, then one report of them all.
#
#   [METHODS="tepo grpo ..."] [SEEDS="0 1 2 3 4"] [JOBS=N] [OUT=runs/study] \
#     launch/sweep.sh tiny [--config.FIELD=VALUE ...]
#
# Every row of the paper unless METHODS says which. All start from one base
# model, made first; a seed is of the data's order and of the sampling. Run
# again, it goes on where it was. The report is OUT/report/report.html.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "launch/sweep.sh: error: $*" >&2; exit 2; }
[[ ${1:-} == tiny ]] \
  || fail "usage: launch/sweep.sh tiny [--config.FIELD=VALUE ...]"
shift

launch/setup.sh cpu
export JAX_PLATFORMS=cpu
python=.venv/bin/python
out=${OUT:-runs/study}
methods=${METHODS:-$("$python" -c \
  'from configs import methods; print(*methods.paper(1e-3))')}
read -ra seeds <<<"${SEEDS:-0 1 2 3 4}"
jobs=${JOBS:-$(nproc)}
# The runs compile the same programs: the first does it for all.
export JAX_COMPILATION_CACHE_DIR=$PWD/$out/compiled
[[ $out == /* ]] && JAX_COMPILATION_CACHE_DIR=$out/compiled
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
mkdir -p "$out/logs" "$out/runs"

if [[ ! -d $out/base_model ]]; then
  "$python" -m tepo_jax.pretrain --config=configs/tiny.py \
    --out="$out/base_model"
fi

# train [OVERRIDE ...] METHOD SEED
train() {
  local method=${*: -2:1} seed=${*: -1} name
  name=${method}_$seed
  set -- "${@:1:$#-2}"
  echo "$name: see $out/logs/$name.log"
  XLA_FLAGS=--xla_cpu_multi_thread_eigen=false \
    "$python" -m tepo_jax.train --config="configs/tiny.py:$method" \
    --config.seed="$seed" --config.model="$out/base_model" \
    --workdir="$out/runs/$name" "$@" >>"$out/logs/$name.log" 2>&1 \
    || { echo "$name failed: $(tail -n 1 "$out/logs/$name.log")" >&2
         return 1; }
}
export -f train
export python out

# Seed by seed, so that a study that is stopped has all methods alike.
status=0
for seed in "${seeds[@]}"; do
  for method in $methods; do printf '%s\0%s\0' "$method" "$seed"; done
done | xargs -0 -n 2 -P "$jobs" bash -c 'train "$@"' sweep "$@" || status=1
"$python" -m tepo_jax.report --runs="$out/runs/*" --out="$out/report"
exit "$status"
