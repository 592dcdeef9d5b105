#!/usr/bin/env bash
# Makes many runs, then their report. It skips complete runs and resumes
# interrupted ones; a failed run is reported, and the others continue.
#
#   [METHODS="tepo grpo ..."] [SEEDS="0 1 2 3 4"] [JOBS=N] [OUT=runs/study] \
#     launch/sweep.sh tiny [--config.FIELD=VALUE ...]
#   [RUNS=runs] launch/sweep.sh [--dry-run] [--slice] \
#     table1|table2|table3|table4 [--config.FIELD=VALUE ...]
#
# tiny: trains METHODS (default: every row of the paper) on the embedded task,
# JOBS at a time (default: one per core). All runs start from one base model; a
# seed determines the data order and the sampling. The report is
# OUT/report/report.html.
#
# table1 to table4: train and evaluate the rows of a table of the paper, then
# print the table. --dry-run prints the commands. Run launch/setup.sh first.
# --slice runs them on the slice that NAME, ZONE and PROJECT name, after
# launch/tpu_vm.sh create and setup. RUNS=gs://BUCKET/FOLDER, or bucket/FOLDER
# in the bucket that is mounted there: then each result is copied to the same
# folder here.
#
# --config.FIELD=VALUE applies to every training and evaluation.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "launch/sweep.sh: error: $*" >&2; exit 2; }

dry_run='' slice=''
if [[ ${1:-} == --dry-run ]]; then dry_run=yes; shift; fi
if [[ ${1:-} == --slice ]]; then slice=yes; shift; fi
[[ ${1:-} =~ ^table[1-4]$ || ( ${1:-} == tiny && -z $dry_run$slice ) ]] \
  || fail "usage: launch/sweep.sh tiny [--config.FIELD=VALUE ...], or" \
    "launch/sweep.sh [--dry-run] [--slice] table1|table2|table3|table4" \
    "[--config.FIELD=VALUE ...]"
[[ -z $slice || ${RUNS:-} == bucket/?* || ${RUNS:-} == gs://?* ]] \
  || fail "--slice needs RUNS=gs://BUCKET/FOLDER, or bucket/FOLDER in the" \
    "mounted bucket"
what=$1
shift
for argument in "$@"; do
  [[ $argument == --config.* ]] || fail "unexpected argument '$argument'"
done

# execute COMMAND...: if it starts a program on a slice, waits for that too, and
# copies what an evaluation has written.
execute() {
  local argument
  [[ -n $slice ]] || { "$@"; return; }
  launch/tpu_vm.sh wait || true  # for what an interrupted sweep left behind
  "$@" && launch/tpu_vm.sh wait || return
  for argument in "$@"; do
    [[ $argument != --out=* || $argument == --out=gs://* ]] \
      || launch/tpu_vm.sh fetch "${argument#--out=}" || return
  done
}

# table NUMBER [OVERRIDE ...]
table() {
  local report list failed=0 skip='' line words command
  [[ -x .venv/bin/python ]] || fail "no .venv: run launch/setup.sh cpu|gpu|tpu"
  report=(.venv/bin/python -m tepo_jax.report "--table=$1"
          "--runs=${RUNS:-runs}")
  shift
  list=$("${report[@]}" --commands)
  while IFS= read -r line; do
    [[ -n $line ]] || continue
    read -ra words <<<"$line"
    command=(.venv/bin/python -m "${words[@]}" "$@")
    [[ -z $slice ]] \
      || command=(launch/tpu_vm.sh run "${words[@]#tepo_jax.}" "$@")
    if [[ -n $dry_run ]]; then
      printf '%q ' "${command[@]}"
      echo
    elif [[ -n $skip && $line == *"--checkpoint=$skip "* ]]; then
      continue  # evaluates a run whose training failed
    elif ! execute "${command[@]}" </dev/null; then
      echo "launch/sweep.sh: failed: ${command[*]}" >&2
      failed=$((failed + 1))
      [[ $line != *--workdir=* ]] || skip=${line##*--workdir=}
    fi
  done <<<"$list"
  [[ -z $dry_run ]] || return 0
  "${report[@]}"
  [[ $failed -eq 0 ]] || { echo "launch/sweep.sh: $failed commands failed" >&2
    return 1; }
}

# train [OVERRIDE ...] METHOD SEED
train() {
  local method=${*: -2:1} seed=${*: -1} name
  name=${method}_$seed
  set -- "${@:1:$#-2}"
  echo "$name: see $out/logs/$name.log"
  XLA_FLAGS=--xla_cpu_multi_thread_eigen=false \
    .venv/bin/python -m tepo_jax.train --config="configs/tiny.py:$method" \
    --config.seed="$seed" --config.model="$out/base_model" \
    --config.eval.period=4 \
    --workdir="$out/runs/$name" "$@" >>"$out/logs/$name.log" 2>&1 \
    || { echo "$name failed: $(tail -n 1 "$out/logs/$name.log")" >&2
         return 1; }
}

# tiny [OVERRIDE ...]
tiny() {
  local methods seeds seed method status=0
  launch/setup.sh cpu
  export JAX_PLATFORMS=cpu out=${OUT:-runs/study}
  methods=${METHODS:-$(.venv/bin/python -c \
    'from configs import methods; print(*methods.paper(1e-3))')}
  read -ra seeds <<<"${SEEDS:-0 1 2 3 4}"
  # All runs compile the same programs; share the first one's.
  export JAX_COMPILATION_CACHE_DIR=$PWD/$out/compiled
  [[ $out != /* ]] || JAX_COMPILATION_CACHE_DIR=$out/compiled
  export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
  mkdir -p "$out/logs" "$out/runs"
  [[ -d $out/base_model ]] || .venv/bin/python -m tepo_jax.pretrain \
    --config=configs/tiny.py --out="$out/base_model"
  export -f train
  # Seed by seed: an interrupted study then has the same seeds of all methods.
  for seed in "${seeds[@]}"; do
    for method in $methods; do printf '%s\0%s\0' "$method" "$seed"; done
  done | xargs -0 -n 2 -P "${JOBS:-$(nproc)}" bash -c 'train "$@"' sweep "$@" \
    || status=1
  .venv/bin/python -m tepo_jax.report --runs="$out/runs/*" --out="$out/report"
  return "$status"
}

if [[ $what == tiny ]]; then
  tiny "$@"
else
  table "${what#table}" "$@"
fi
