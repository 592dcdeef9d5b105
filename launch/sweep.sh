#!/usr/bin/env bash
# A table of the paper, row by row: training, then evaluation. What is complete
# is skipped, what was interrupted goes on; ends with the table.
#
#   [RUNS=runs] launch/sweep.sh [--dry-run] table1|table2|table3|table4 \
#     [--config.FIELD=VALUE ...]
#
# Fields are given to every training and evaluation. --dry-run prints the
# commands. A row that fails is told, and the others are run. Needs an
# environment that launch/setup.sh made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "launch/sweep.sh: error: $*" >&2; exit 2; }

dry_run=
if [[ ${1:-} == --dry-run ]]; then dry_run=yes; shift; fi
[[ ${1:-} =~ ^table([1-4])$ ]] || fail "usage: launch/sweep.sh [--dry-run]" \
  "table1|table2|table3|table4 [--config.FIELD=VALUE ...]"
table=${BASH_REMATCH[1]}
shift
for argument in "$@"; do
  [[ $argument == --config.* ]] || fail "unexpected argument '$argument'"
done
[[ -x .venv/bin/python ]] || fail "no .venv: run launch/setup.sh cpu|gpu|tpu"

report=(.venv/bin/python -m tepo_jax.report "--table=$table"
        "--runs=${RUNS:-runs}")
list=$("${report[@]}" --commands)
failed=0 skip=
while IFS= read -r line; do
  [[ -n $line ]] || continue
  read -ra words <<<"$line"
  command=(.venv/bin/python -m "${words[@]}" "$@")
  if [[ -n $dry_run ]]; then
    printf '%q ' "${command[@]}"
    echo
  elif [[ -n $skip && $line == *"--checkpoint=$skip "* ]]; then
    continue  # its training failed
  elif ! "${command[@]}" </dev/null; then
    echo "launch/sweep.sh: failed: ${command[*]}" >&2
    failed=$((failed + 1))
    [[ $line != *--workdir=* ]] || skip=${line##*--workdir=}
  fi
done <<<"$list"
[[ -z $dry_run ]] || exit 0
"${report[@]}"
[[ $failed -eq 0 ]] || { echo "launch/sweep.sh: $failed commands failed" >&2
  exit 1; }
