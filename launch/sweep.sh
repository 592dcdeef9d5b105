#!/usr/bin/env bash
# Makes many runs, then their report. It skips complete runs and resumes
# interrupted ones; a failed run is reported, and the others continue. Ctrl-C or
# SIGTERM, to the sweep or to a run, ends the sweep once its runs have saved; the same
# command resumes it.
#
#   [METHODS="tepo grpo ..."] [SEEDS="0 1 2 3 4"] [JOBS=N] [OUT=runs/study] \
#     launch/sweep.sh tiny [--config.FIELD=VALUE ...]
#   [METHODS="tepo grpo"] [SEEDS="0 1 2"] [OUT=runs/own] \
#     launch/sweep.sh own FILE.py[:ARGUMENT] [--grid=FIELD=VALUE,VALUE ...] \
#     [--config.FIELD=VALUE ...]
#   [RUNS=runs] launch/sweep.sh [--dry-run] [--slice] \
#     table1|table2|table3|table4 [--config.FIELD=VALUE ...]
#
# tiny: trains METHODS (default: every row of the paper) on the embedded task,
# JOBS at a time (default: one per core). All runs start from one base model; a
# seed determines the data order and the sampling. The report is
# OUT/report/report.html.
#
# own: trains METHODS of a config of your own with each of SEEDS at every point of
# the grid, one run after the other. A method follows the config's ARGUMENT, such
# as configs/small.py:qwen2_5_0_5b,gpu24. The report is OUT/report/report.html;
# tepo_jax.report --map compares methods at the points of a grid.
#
# table1 to table4: train and evaluate the rows of a table of the paper, then
# print the table. --dry-run prints the commands. Run launch/setup.sh first.
# --slice runs them on the slice that NAME, ZONE and PROJECT name, after
# launch/tpu_vm.sh create and setup. RUNS=gs://BUCKET/FOLDER, or bucket/FOLDER
# in the bucket that is mounted there: then each result is copied to the same
# folder here.
#
# --config.FIELD=VALUE applies to every training and evaluation; of a table,
# --config.eval.FIELD to evaluations only, unless eval.period is among them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh

fail() { echo "launch/sweep.sh: error: $*" >&2; exit 2; }

trap 'exit 130' INT
trap 'say_resumes $?' EXIT

# say_resumes STATUS: of this script.
say_resumes() {
  [[ $1 != 42 && $1 != 130 ]] || echo "launch/sweep.sh:" \
    "stopped: the same command resumes; it skips complete runs" >&2
}

# unless_stopped STATUS: ends the sweep if it is that of a run that was stopped, by
# Ctrl-C (130) or SIGTERM (42); another failure does not end it.
unless_stopped() { [[ $1 != 42 && $1 != 130 ]] || exit "$1"; }

# count_failure STATUS NAME: reports a failed run and counts it in `failed`.
count_failure() {
  unless_stopped "$1"
  echo "launch/sweep.sh: failed: $2" >&2
  failed=$((failed + 1))
}

# A stopped run prints this as the command that resumes.
TEPO_COMMAND=${TEPO_COMMAND:-$(command_line 'METHODS SEEDS JOBS OUT RUNS' \
  launch/sweep.sh "$@")}
export TEPO_COMMAND

dry_run='' slice=''
if [[ ${1:-} == --dry-run ]]; then dry_run=yes; shift; fi
if [[ ${1:-} == --slice ]]; then slice=yes; shift; fi
[[ ${1:-} =~ ^table[1-4]$ \
   || ( ${1:-} =~ ^(tiny|own)$ && -z $dry_run$slice ) ]] \
  || fail "usage: launch/sweep.sh tiny|own FILE.py" \
    "[--config.FIELD=VALUE ...], or" \
    "launch/sweep.sh [--dry-run] [--slice] table1|table2|table3|table4" \
    "[--config.FIELD=VALUE ...]"
[[ -z $slice || ${RUNS:-} == bucket/?* || ${RUNS:-} == gs://?* ]] \
  || fail "--slice needs RUNS=gs://BUCKET/FOLDER, or bucket/FOLDER in the" \
    "mounted bucket"
what=$1
shift
[[ ! $what =~ ^(own|table) || -z ${HOSTS:-} ]] || fail "HOSTS is set, with which" \
  "launch/gpu.sh waits for no run"
config='' grid=()
if [[ $what == own ]]; then
  config=${1:-}
  [[ -f ${config%%:*} ]] || fail "own needs a config file, not '$config'"
  [[ $config == *:* ]] && config+=, || config+=:
  shift
  while [[ ${1:-} == --grid=*=?* ]]; do grid+=("${1#--grid=}"); shift; done
fi
for argument in "$@"; do
  [[ $argument == --config.* ]] || fail "unexpected argument '$argument'"
done

# execute COMMAND...: if it starts a program on a slice, waits for that too, and
# copies what an evaluation has written.
execute() {
  local argument
  [[ -n $slice ]] || { attend "$@"; return; }
  attend launch/tpu_vm.sh wait || true  # for what an interrupted sweep left behind
  attend "$@" && attend launch/tpu_vm.sh wait || return
  for argument in "$@"; do
    [[ $argument != --out=* || $argument == --out=gs://* ]] \
      || launch/tpu_vm.sh fetch "${argument#--out=}" || return
  done
}

# table NUMBER [OVERRIDE ...]
table() {
  local report list failed=0 skip='' line words command argument training=()
  [[ -x .venv/bin/python ]] || fail "no .venv: run launch/setup.sh cpu|gpu|tpu"
  report=(.venv/bin/python -m tepo_jax.report "--table=$1"
          "--runs=${RUNS:-runs}")
  shift
  for argument in "$@"; do  # without eval.period a training evaluates nothing
    [[ $argument == --config.eval.* && $* != *--config.eval.period=* ]] \
      || training+=("$argument")
  done
  list=$("${report[@]}" --commands)
  while IFS= read -r line; do
    [[ -n $line ]] || continue
    eval "words=($line)"  # the report quotes it for a shell
    if [[ ${words[0]} == tepo_jax.train ]]; then
      words+=(${training[@]+"${training[@]}"})
    else
      words+=("$@")
    fi
    command=(.venv/bin/python -m "${words[@]}")
    [[ ! -e .venv/.installed-gpu ]] \
      || command=(launch/gpu.sh "${words[@]#tepo_jax.}")
    [[ -z $slice ]] \
      || command=(launch/tpu_vm.sh run "${words[@]#tepo_jax.}")
    if [[ -n $dry_run ]]; then
      printf '%q ' "${command[@]}"
      echo
    elif [[ -n $skip ]] && printf '%s\n' "${words[@]}" \
        | grep -xF -e "--checkpoint=$skip" >/dev/null; then
      continue  # evaluates a run whose training failed
    else
      execute "${command[@]}" </dev/null || {
        count_failure $? "${command[*]}"
        [[ ${words[0]} != tepo_jax.train ]] \
          || skip=$(printf '%s\n' "${words[@]}" | sed -n 's/^--workdir=//p'); }
    fi
  done <<<"$list"
  [[ -z $dry_run ]] || return 0
  "${report[@]}"
  [[ $failed -eq 0 ]] || { echo "launch/sweep.sh: $failed commands failed" >&2
    return 1; }
}

# train [OVERRIDE ...] METHOD SEED: nothing if a run was stopped, whose status is
# then in logs/stopped. While it runs, logs/NAME.pid has its number.
train() {
  local method=${*: -2:1} seed=${*: -1} name status=0
  name=${method}_$seed
  [[ ! -e $out/logs/stopped ]] || return 0
  set -- "${@:1:$#-2}"
  echo "$name: see $out/logs/$name.log"
  # shellcheck disable=SC2016  # the inner bash is meant, which becomes python
  XLA_FLAGS=--xla_cpu_multi_thread_eigen=false \
    bash -c 'echo $$ >"$0.pid"; [[ -e ${0%/*}/stopped ]] || exec "$@"' \
    "$out/logs/$name" .venv/bin/python -m tepo_jax.train \
    --config="configs/tiny.py:$method" --config.seed="$seed" \
    --config.model="$out/base_model" --workdir="$out/runs/$name" \
    --config.eval.period=4 "$@" \
    >>"$out/logs/$name.log" 2>&1 || status=$?
  rm -f "$out/logs/$name.pid"
  case $status in
    0) ;;
    42 | 130) echo "$status" >"$out/logs/stopped" ;;
    *) [[ $status != 143 || ! -e $out/logs/stopped ]] || return 0  # before it could save
       echo "$name failed: $(tail -n 1 "$out/logs/$name.log")" >&2
       return 1 ;;
  esac
}

# prepare OUT: the base model that all runs start from.
prepare() {
  launch/setup.sh cpu
  export JAX_PLATFORMS=cpu out=$1
  # All runs compile the same programs; share the first one's.
  export JAX_COMPILATION_CACHE_DIR=$PWD/$out/compiled
  [[ $out != /* ]] || JAX_COMPILATION_CACHE_DIR=$out/compiled
  export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
  mkdir -p "$out/logs" "$out/runs"
  [[ -d $out/base_model ]] || attend .venv/bin/python -m tepo_jax.pretrain \
    --config=configs/tiny.py --out="$out/base_model"
  export -f train
}

# train_all [OVERRIDE ...]: trains what stdin lists, `train`'s last arguments for
# each run. xargs has to wait for the runs until they end: they
# react to Ctrl-C, and stop_runs passes SIGTERM on.
train_all() {
  local cores status=0
  rm -f "$out/logs/stopped" "$out"/logs/*.pid
  # macOS has no nproc.
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  # Without a job GNU's xargs adds nothing to the overrides; -r would prevent
  # that, but the older xargs of macOS refuse it.
  stop_by=stop_runs attend bash -c 'trap "" INT; exec xargs "$@"' xargs \
    -n 2 -P "${JOBS:-$cores}" \
    bash -c "[[ \$# -eq $# ]] || train \"\$@\"" sweep "$@" || status=$?
  [[ ! -e $out/logs/stopped ]] || status=$(<"$out/logs/stopped")
  return "$status"
}

stop_runs() {
  echo 42 >"$out/logs/stopped"
  cat "$out"/logs/*.pid 2>/dev/null | xargs kill -TERM 2>/dev/null || true
}

# tiny [OVERRIDE ...]
tiny() {
  local methods seeds seed method status=0
  prepare "${OUT:-runs/study}"
  methods=${METHODS:-$(.venv/bin/python -c \
    'from configs import methods; print(*methods.paper(1e-3))')}
  read -ra seeds <<<"${SEEDS:-0 1 2 3 4}"
  # Seed by seed: an interrupted study then has the same seeds of all methods.
  for seed in ${seeds[@]+"${seeds[@]}"}; do
    for method in $methods; do echo "$method $seed"; done
  done >"$out/logs/list"
  train_all "$@" <"$out/logs/list" || { unless_stopped $?; status=1; }
  .venv/bin/python -m tepo_jax.report --runs="$out/runs/*" --out="$out/report"
  return "$status"
}

# own [OVERRIDE ...]: $config at every point of $grid.
own() {
  local points=('') next point axis value method seed name failed=0
  local out=${OUT:-runs/own} overrides command
  [[ -x .venv/bin/python ]] || fail "no .venv: run launch/setup.sh cpu|gpu|tpu"
  for axis in ${grid[@]+"${grid[@]}"}; do
    next=()
    for point in "${points[@]}"; do
      for value in $(tr , ' ' <<<"${axis#*=}"); do
        next+=("$point ${axis%%=*}=$value")
      done
    done
    points=(${next[@]+"${next[@]}"})
  done
  # Seed by seed: an interrupted sweep then has the same seeds of all points.
  for seed in ${SEEDS:-0 1 2}; do
    for point in "${points[@]}"; do
      for method in ${METHODS:-tepo grpo}; do
        name=${method//,/_}$(tr ' ' _ <<<"$point")_seed$seed
        read -ra overrides <<<"${point// / --config.}"
        command=(.venv/bin/python -m tepo_jax.train)
        [[ ! -e .venv/.installed-gpu ]] || command=(launch/gpu.sh train)
        attend "${command[@]}" --config="$config$method" --config.seed="$seed" \
          --workdir="$out/runs/$name" ${overrides[@]+"${overrides[@]}"} "$@" \
          </dev/null || count_failure $? "$name"
      done
    done
  done
  .venv/bin/python -m tepo_jax.report --runs="$out/runs" --out="$out/report"
  [[ $failed -eq 0 ]] || { echo "launch/sweep.sh: $failed runs failed" >&2
    return 1; }
}

if [[ $what != table* ]]; then
  "$what" "$@"
else
  table "${what#table}" "$@"
fi
