#!/usr/bin/env bash
# Runs the programs on a Cloud TPU slice from your machine.
#
#   NAME=… ZONE=… PROJECT=… [TYPE=v6e-16] [SPOT=1] [BUCKET=…] \
#       launch/tpu_vm.sh [--dry-run] COMMAND
#
#   create            requests a slice of TYPE and waits until it is active;
#                     SPOT=1 is cheaper, but can be preempted
#   setup             copies this repository to all hosts and installs there,
#                     with files of yours in it, but without runs/ and any
#                     *.log; with BUCKET=…, mounts that bucket as tepo/bucket
#   run [PROGRAM] ARGUMENTS
#                     starts python -m tepo_jax.PROGRAM ARGUMENTS on all hosts
#                     and returns; PROGRAM is train (the default),
#                     evaluate, export, pretrain, benchmark, or report
#                     with --replay or --inspect
#   wait              waits until the program ends; exits with its status
#   watch [PROGRAM] ARGUMENTS
#                     create and setup unless the slice is active, run, wait;
#                     if the slice is preempted, again, until the program ends
#   logs              follows the output of the first host
#   fetch PATH        copies a file or folder of the first host's repository to
#                     the same place in this one; for gs://… use
#                     gcloud storage cp -r
#   stop              makes a training run save and exit
#   delete            deletes the slice
#
# A run resumes from its last checkpoint: by itself if a process is lost; with
# `watch`, or `delete`, `create`, `setup` and the same `run`, if the slice was
# preempted. For that its --workdir must be in a bucket: gs://BUCKET/NAME, or
# bucket/NAME in the mounted one. On several hosts, --checkpoint and --out must
# be there too. --dry-run prints the commands instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  sed -n '2,/^set /{s/^# \{0,1\}//p}' launch/tpu_vm.sh
  exit
fi

fail() { echo "launch/tpu_vm.sh: error: $*" >&2; exit 2; }

commands='create|setup|run|wait|watch|logs|fetch|stop|delete'
dry_run=
if [[ ${1:-} == --dry-run ]]; then dry_run=yes; shift; fi
command=${1:-}
[[ $command =~ ^($commands)$ ]] \
  || fail "usage: launch/tpu_vm.sh [--dry-run] $commands"
shift
[[ $command =~ ^(run|watch|fetch)$ || $# -eq 0 ]] \
  || fail "unexpected argument '$1'"
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

# Splits the arguments of `run` into `program` and `arguments`.
parse_run() {
  program=train
  if [[ ${1:-} =~ ^(train|evaluate|export|pretrain|benchmark|report)$ ]]; then
    program=$1; shift
  fi
  [[ $# -gt 0 ]] || fail "$command needs the program's arguments, for example" \
    "--config=configs/tiny.py:tepo --workdir=gs://my-bucket/tiny"
  arguments=("$@")
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

# Prints the state of the slice; nothing if there is none. Asks again if gcloud
# fails for another reason, such as a lost connection.
slice_state() {
  local answer
  [[ -z $dry_run ]] || return 0
  until answer=$(tpus queued-resources describe "$NAME" \
      --format='value(state.state)' 2>&1); do
    [[ $answer != *NOT_FOUND* ]] || return 0
    sleep "${PAUSE:-30}"
  done
  echo "${answer##*$'\n'}"
}

# Returns once the slice is active. `create` can be repeated to keep waiting.
wait_for_slice() {
  local state=
  while :; do
    state=$(slice_state)
    echo "launch/tpu_vm.sh: $NAME is $state" >&2
    case $state in
      ACTIVE) return ;;
      '' | FAILED | SUSPENDED | SUSPENDING)
        fail "the slice is ${state:-gone}: run launch/tpu_vm.sh delete, then" \
          "create" ;;
    esac
    sleep "${PAUSE:-30}"
  done
}

create() {
  local spot=()
  [[ -z ${SPOT:-} ]] || spot=(--spot)
  [[ -n $(slice_state) ]] || tpus queued-resources create "$NAME" \
    --node-id="$NAME" --accelerator-type="$TYPE" \
    --runtime-version="$(software)" "${spot[@]}"
  if [[ -n $dry_run ]]; then
    tpus queued-resources describe "$NAME" --format='value(state.state)'
  else
    wait_for_slice
  fi
}

setup() {
  archive=$(mktemp -d)/tepo.tgz
  trap 'rm -rf "$(dirname "$archive")"' EXIT
  # Status 1: a file grew meanwhile, such as the output of a run here.
  do_it tar -czf "$archive" --exclude=__pycache__ --exclude='./.*' \
    --exclude=./runs --exclude=./bucket --exclude='./*.log' . || [[ $? -eq 1 ]]
  tpus tpu-vm scp "$archive" "$NAME:tepo.tgz" --worker=all
  on_hosts all "mkdir -p tepo && tar -xzf tepo.tgz -C tepo \
&& SKIP_SELFTEST=1 tepo/launch/setup.sh tpu"
  [[ -z ${BUCKET:-} ]] || on_hosts all "$(mount_bucket)"
}

in_progress="kill -0 \$(cat job.pid 2>/dev/null) 2>/dev/null"  # on a host

run() {
  # The hosts end at slightly different times. nohup: the program survives a lost
  # connection.
  on_hosts all "cd tepo || exit; for _ in \$(seq 30); do \
$in_progress || break; sleep 1; done; if $in_progress; \
then echo a program is in progress here: stop it first >&2; exit 2; fi; \
rm -f job.status; STATUS=job.status TEPO_MULTIHOST=1 JAX_PLATFORMS=tpu,cpu \
nohup launch/supervise.sh .venv/bin/python -m tepo_jax.$program \
$(printf '%q ' "${arguments[@]}")>>job.log 2>&1 </dev/null & echo \$! >job.pid"
}

stop() { on_hosts all "kill -TERM \$(cat tepo/job.pid)"; }

delete() { tpus queued-resources delete "$NAME" --force --quiet; }

# Waits for the program, also over a lost connection; exits with its status, or
# with $taken if the slice was taken away.
taken=75
wait_for_program() {
  local status state
  while :; do
    if status=$(on_hosts 0 \
        "cd tepo; $in_progress || cat job.status || echo 1"); then
      [[ -z $status ]] || break
    else
      state=$(slice_state)
      [[ -n $state ]] || fail "there is no slice $NAME"
      [[ $state == ACTIVE ]] || {
        echo "launch/tpu_vm.sh: $NAME is $state" >&2; exit $taken; }
    fi
    sleep "${PAUSE:-30}"
  done
  [[ -z $dry_run ]] || { echo "$status"; return; }
  on_hosts 0 "tail -n 3 tepo/job.log" >&2 || true
  # The others restart theirs if they see only that a process is lost.
  [[ $status == 0 ]] || stop >/dev/null 2>&1 || true
  exit "$status"
}

# Starts the program on an active slice, unless one is in progress there.
start() {
  local state
  state=$(slice_state)
  if [[ $state == ACTIVE ]] && on_hosts 0 "cd tepo && $in_progress"; then
    echo "launch/tpu_vm.sh: waiting for the program in progress" >&2
    return
  fi
  [[ ! $state =~ ^(FAILED|SUSPENDED|SUSPENDING)$ ]] || delete
  create
  setup
  run
}

watch() {
  local status
  while :; do
    set +e
    (set -e; start)
    status=$?
    if [[ $status -eq 0 ]]; then
      (set -e; wait_for_program)
      status=$?
      [[ $status -eq $taken ]] || exit "$status"
    elif [[ ! $(slice_state) =~ ^(FAILED|SUSPENDED|SUSPENDING)$ ]]; then
      exit "$status"  # not for want of the slice
    fi
    set -e
    echo "launch/tpu_vm.sh: $NAME was taken away; starting again" >&2
    sleep "${PAUSE:-30}"
  done
}

case $command in
  create | watch)
    [[ -n ${TYPE:-} ]] || fail "TYPE is not set, for example TYPE=v6e-16"
    [[ $TYPE != v5e-* ]] \
      || fail "TYPE=$TYPE: gcloud's name is v5litepod-${TYPE#v5e-}" ;;&
  run | watch) parse_run "$@" ;;&
  create | setup | run | watch | stop | delete) "$command" ;;
  wait) wait_for_program ;;
  logs) on_hosts 0 "tail -n 100 -F tepo/job.log" ;;
  fetch)
    [[ $# -eq 1 ]] || fail "fetch needs one path"
    [[ $1 != gs://* ]] || fail "$1 is on no host: gcloud storage cp -r $1 ."
    do_it mkdir -p "$(dirname "$1")"
    tpus tpu-vm scp --recurse "$NAME:tepo/$1" "$(dirname "$1")" --worker=0 ;;
esac
