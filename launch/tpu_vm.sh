#!/usr/bin/env bash
# Runs training on a Cloud TPU slice from your machine.
#
#   NAME=… ZONE=… PROJECT=… [TYPE=v6e-16] [SPOT=1] [BUCKET=…] \
#       launch/tpu_vm.sh [--dry-run] COMMAND
#
#   create            requests a slice of TYPE and waits until it is active;
#                     SPOT=1 is cheaper, but can be preempted
#   setup             copies this repository to all hosts and installs there;
#                     with BUCKET=…, mounts that bucket as tepo/bucket
#   run ARGUMENTS     starts python -m tepo_jax.train ARGUMENTS and returns
#   logs              follows the output of the first host
#   stop              makes the run save and exit
#   delete            deletes the slice
#
# A run resumes from its last checkpoint: by itself if a process is lost; after
# `delete`, `create`, `setup` and the same `run` if the slice was preempted. For
# that its --workdir must be in the bucket: --workdir=gs://BUCKET/NAME, which is
# bucket/NAME on the hosts. --dry-run prints the commands instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  sed -n '2,/^set /{s/^# \{0,1\}//p}' launch/tpu_vm.sh
  exit
fi

fail() { echo "launch/tpu_vm.sh: error: $*" >&2; exit 2; }

commands='create|setup|run|logs|stop|delete'
dry_run=
if [[ ${1:-} == --dry-run ]]; then dry_run=yes; shift; fi
command=${1:-}
[[ $command =~ ^($commands)$ ]] \
  || fail "usage: launch/tpu_vm.sh [--dry-run] $commands"
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
tpus() { do_it gcloud compute tpus "$@" "${where[@]}"; }
on_hosts() { tpus tpu-vm ssh "${NAME:?}" --worker="$1" --command="$2"; }

# The arguments of `run`, with gs://BUCKET/… replaced by the hosts' folder.
arguments=()
in_bucket() {
  local argument there=--workdir=gs://${BUCKET:-}/
  for argument in "$@"; do
    if [[ $argument == --workdir=gs://* ]]; then
      [[ -n ${BUCKET:-} && $argument == "$there"?* ]] || fail "$argument:" \
        "only folders of gs://BUCKET are mounted; BUCKET=${BUCKET:-}"
      argument=--workdir=bucket/${argument#"$there"}
    fi
    arguments+=("$argument")
  done
}

software() {
  case $TYPE in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    *) echo tpu-ubuntu2204-base ;;
  esac
}

# Prints the command that mounts the bucket with Google's gcsfuse.
mount_bucket() {
  local apt=https://packages.cloud.google.com/apt
  local key=/usr/share/keyrings/cloud.google.asc
  echo "command -v gcsfuse >/dev/null || { curl -fsS $apt/doc/apt-key.gpg \
| sudo tee $key >/dev/null && echo \"deb [signed-by=$key] $apt \
gcsfuse-\$(lsb_release -cs) main\" | sudo tee \
/etc/apt/sources.list.d/gcsfuse.list && sudo apt-get update -qq \
&& sudo apt-get install -y -qq gcsfuse; } && mkdir -p tepo/bucket \
&& { mountpoint -q tepo/bucket || gcsfuse --implicit-dirs \
--rename-dir-limit=1000000 $(printf %q "$BUCKET") tepo/bucket; }"
}

# Returns once the slice is active. `create` can be repeated to keep waiting.
wait_for_slice() {
  local state=
  while :; do
    state=$(tpus queued-resources describe "$NAME" \
      --format='value(state.state)')
    echo "launch/tpu_vm.sh: $NAME is $state" >&2
    case $state in
      ACTIVE) return ;;
      FAILED|SUSPENDED|SUSPENDING)
        fail "the slice is $state: run launch/tpu_vm.sh delete, then create" ;;
    esac
    sleep "${PAUSE:-30}"
  done
}

case $command in
  create)
    [[ -n ${TYPE:-} ]] || fail "TYPE is not set, for example TYPE=v6e-16"
    spot=()
    [[ -z ${SPOT:-} ]] || spot=(--spot)
    if [[ -n $dry_run ]] \
        || ! tpus queued-resources describe "$NAME" >/dev/null 2>&1; then
      tpus queued-resources create "$NAME" --node-id="$NAME" \
        --accelerator-type="$TYPE" --runtime-version="$(software)" "${spot[@]}"
    fi
    if [[ -n $dry_run ]]; then
      tpus queued-resources describe "$NAME" --format='value(state.state)'
    else
      wait_for_slice
    fi
    ;;
  setup)
    archive=$(mktemp -d)/tepo.tgz
    trap 'rm -rf "$(dirname "$archive")"' EXIT
    do_it tar -czf "$archive" --exclude=__pycache__ \
      tepo_jax configs launch tests requirements.txt
    tpus tpu-vm scp "$archive" "$NAME:tepo.tgz" --worker=all
    on_hosts all "mkdir -p tepo && tar -xzf tepo.tgz -C tepo \
&& SKIP_SELFTEST=1 tepo/launch/setup.sh tpu"
    [[ -z ${BUCKET:-} ]] || on_hosts all "$(mount_bucket)"
    ;;
  run)
    [[ $# -gt 0 ]] || fail "run needs the program's arguments, for example" \
      "--config=configs/tiny.py:tepo --workdir=bucket/tiny"
    in_bucket "$@"
    # nohup: the run survives a lost connection.
    on_hosts all "cd tepo || exit; if kill -0 \$(cat train.pid) 2>/dev/null; \
then echo a run is in progress here: stop it first >&2; exit 2; fi; \
TEPO_MULTIHOST=1 JAX_PLATFORMS=tpu,cpu nohup launch/supervise.sh \
.venv/bin/python -m tepo_jax.train $(printf '%q ' "${arguments[@]}")\
>>train.log 2>&1 </dev/null & echo \$! >train.pid"
    ;;
  logs) on_hosts 0 "tail -n 100 -F tepo/train.log" ;;
  stop) on_hosts all "kill -TERM \$(cat tepo/train.pid)" ;;
  delete) tpus queued-resources delete "$NAME" --force --quiet ;;
esac
