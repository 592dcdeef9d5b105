#!/usr/bin/env bash
# A Cloud TPU slice from your machine: every command goes to all its hosts.
#
#   NAME=… ZONE=… PROJECT=… [TYPE=v5litepod-16] launch/tpu_vm.sh COMMAND
#
#   create            makes the slice (TYPE says which)
#   setup             copies this repository to its hosts and sets them up
#   run ARGUMENTS     starts python -m tepo_jax.train ARGUMENTS, and returns
#   logs              follows the output of the first host
#   delete            gives the slice back
#
# --dry-run as the first argument prints what would be run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "launch/tpu_vm.sh: error: $*" >&2; exit 2; }

dry_run=
if [[ ${1:-} == --dry-run ]]; then dry_run=yes; shift; fi
command=${1:-}
[[ $command =~ ^(create|setup|run|logs|delete)$ ]] \
  || fail "usage: launch/tpu_vm.sh [--dry-run] create|setup|run|logs|delete"
shift
[[ $command == run || $# -eq 0 ]] || fail "unexpected argument '$1'"
for name in NAME ZONE PROJECT; do
  [[ -n ${!name:-} ]] || fail "$name is not set in the environment"
done
where=(--project="$PROJECT" --zone="$ZONE")
[[ -n $dry_run ]] || command -v gcloud >/dev/null || fail "no gcloud:" \
  "https://cloud.google.com/sdk/docs/install"

do_it() {
  if [[ -n $dry_run ]]; then printf '%q ' "$@"; echo; else "$@"; fi
}
tpu() { do_it gcloud compute tpus tpu-vm "$@" "${where[@]}"; }
on_hosts() { tpu ssh "${NAME:?}" --worker="$1" --command="$2"; }

software() {
  case $TYPE in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    *) echo tpu-ubuntu2204-base ;;
  esac
}

case $command in
  create)
    [[ -n ${TYPE:-} ]] || fail "TYPE is not set, for example TYPE=v5litepod-16"
    tpu create "$NAME" --accelerator-type="$TYPE" --version="$(software)"
    ;;
  setup)
    archive=$(mktemp -d)/tepo.tgz
    trap 'rm -rf "$(dirname "$archive")"' EXIT
    do_it tar -czf "$archive" --exclude=__pycache__ \
      tepo_jax configs launch tests requirements.txt
    tpu scp "$archive" "$NAME:tepo.tgz" --worker=all
    on_hosts all "mkdir -p tepo && tar -xzf tepo.tgz -C tepo \
&& tepo/launch/setup.sh tpu"
    ;;
  run)
    [[ $# -gt 0 ]] || fail "run needs the program's arguments, for example" \
      "--config=configs/tiny.py:tepo --workdir=runs/tpu"
    # nohup: a lost connection does not end the run.
    on_hosts all "cd tepo && { TEPO_MULTIHOST=1 nohup .venv/bin/python -m \
tepo_jax.train $(printf '%q ' "$@")>train.log 2>&1 </dev/null & }"
    ;;
  logs) on_hosts 0 "tail -n 100 -f tepo/train.log" ;;
  delete) tpu delete "$NAME" --quiet ;;
esac
