#!/usr/bin/env bash
# Runs the programs on a Cloud TPU slice from your machine.
#
#   NAME=… ZONE=… PROJECT=… [TYPE=v6e-16] [SPOT=1] [BUCKET=…] [MORE=…] \
#       launch/tpu_vm.sh [--dry-run] COMMAND
#
#   types             prints the TYPEs: chips, hosts, planned seconds of a step
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
#                     again if the slice is preempted, a host is restarted or
#                     cannot open its devices or stays unreachable, until the
#                     program ends
#   logs [N|all]      follows the output of host N (default: 0) or of all hosts
#   fetch PATH        copies a file or folder of the first host's repository to
#                     the same place in this one; for gs://… use
#                     gcloud storage cp -r
#   stop              makes a training run or evaluation save and exit
#   delete            deletes the slice
#
# Exit status of wait and watch: the program's; 2 if nothing was started or the
# slice cannot be used; 42 if the program was interrupted and has work left. It
# resumes from its last checkpoint: with `watch` by itself, else with the same
# `run`, after `delete`, `create` and `setup` if the slice was preempted. For
# that its --workdir must be in a bucket: gs://BUCKET/NAME, or bucket/NAME in the
# mounted one. On several hosts, --checkpoint and --out must be there too.
# --dry-run prints the commands instead.
#
# MORE, as variables: CREATE_FLAGS='--reserved --internal-ips --network=…
# --service-account=…' for gcloud's create; SSH_FLAGS='--internal-ip' or
# '--tunnel-through-iap' for its ssh and scp; HF_TOKEN, WANDB_API_KEY and those
# that PASS='NAME NAME' lists are passed to the program, in a file that only you
# can read; PACKAGES=… is for launch/setup.sh, wandb if WANDB_API_KEY is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
if (( BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404 )); then
  echo "launch/tpu_vm.sh: error: needs bash 4.4 (macOS: brew install bash)" >&2
  exit 2
fi
source launch/tpu_types.sh
source launch/tpu_request.sh
source launch/tpu_poll.sh

say() { echo "launch/tpu_vm.sh: $*" >&2; }
fail() { say "error: $*"; exit 2; }
pause() { sleep "${PAUSE:-30}"; }

do_it() {
  if [[ -n $dry_run ]]; then printf '%q ' "$@"; echo; else "$@"; fi
}
tpus() { do_it gcloud compute tpus "$@" "${where[@]}"; }

# remote ssh|scp ARGUMENTS...: a host that is lost is noticed after a minute.
remote() {
  local option track=() lost=()
  for option in ConnectTimeout=30 ServerAliveInterval=15 ServerAliveCountMax=4; do
    lost+=("--$1-flag=-o$option")
  done
  [[ ${SSH_FLAGS:-} != *--tunnel-through-iap* ]] || track=(alpha)
  do_it gcloud "${track[@]}" compute tpus tpu-vm "$@" "${ssh_flags[@]}" \
    "${lost[@]}" "${where[@]}"
}

# on_hosts N,N,…|all COMMAND
on_hosts() {
  remote ssh "${NAME:?}" --worker="$1" --command="$2" </dev/null
}

# send FILE NAME N,N,…|all: to these hosts. For several hosts gcloud refuses to use
# its key if an agent is running that does not have it.
send() {
  local key=~/.ssh/google_compute_engine
  [[ -n $dry_run || ! -f $key ]] || ssh-add -q "$key" 2>/dev/null || true
  remote scp "$1" "$NAME:$2" --worker="$3" </dev/null
}

# What gcloud prints if it does not reach Google, or Google fails, or this minute's
# quota of calls is used up.
network='gcloud crashed|Max retries exceeded|Unable to find the server|'
network+='UNAVAILABLE|INTERNAL:|DEADLINE_EXCEEDED|[Cc]onnection (reset|aborted)|'
network+="per minute|[Tt]imed out|'status': '?5[0-9][0-9]|\"code\": 5[0-9][0-9]"

# Prints the answer of gcloud compute tpus ARGUMENTS. After a network error it
# asks again, 20 times at most. What gcloud says on stderr is then in $said. gcloud
# would ask a terminal for a password, and wait for it.
ask() {
  local left
  for (( left = 20; left > 0; left-- )); do
    ! tpus "$@" 2>"$said" </dev/null || return 0
    grep -qE "$network" "$said" || return 1
    say "no answer from Google; asking again: $(tail -n 1 "$said")"
    pause
  done
  return 1
}

# explained COMMAND...: runs what needs hosts that are set up; returns its status.
# If it fails because they are not, or not there, that is said in place of what
# gcloud and ssh print.
explained() {
  local status=0
  "$@" 2>"$scratch/printed" || status=$?
  if [[ $status -ne 0 ]]; then
    need_slice
    poll
    [[ $verdict != bare ]] || refuse_idle
  fi
  cat "$scratch/printed" >&2
  return "$status"
}

create() {
  local status=0
  request || status=$?
  [[ $status -ne 2 ]] || fail "gcloud refused the request, see above"
  [[ $status -eq 0 ]] || fail "the slice is ${state:-gone}: $remake"
  done_with "$NAME is there" setup
}

delete() {
  if ask queued-resources delete "$NAME" --force; then
    [[ -n $dry_run ]] || say "$NAME is deleted"
    return
  fi
  grep -q NOT_FOUND "$said" || { cat "$said" >&2; return 1; }
  say "there is no slice $NAME"
}

# Five times at most, with growing pauses: a fresh host may not answer yet, and a
# slice may be busy.
repeat() {
  local pauses
  "$@" && return
  for pauses in 1 2 4 8; do
    say "failed; trying again"
    while (( pauses-- > 0 )); do pause; done
    "$@" && return
  done
  return 1
}

# Runs `steps` on the hosts `workers`, to which it sends `archive`, and leaves those
# in `workers` that did not become ready. These say so: gcloud's status names no host,
# and if it was to reach some but not all, it can be 0 in spite of a failure.
set_up_hosts() {
  local count ready
  send "$archive" "tepo.$$.tgz" "$workers" || true  # then the steps fail there
  on_hosts "$workers" "$steps && echo \"tepo: \$HOSTNAME ready\"" \
    | tee "$scratch/ready" && [[ $workers == all ]] && return
  ready=$(sed -n 's/^tepo: .*-w-\([0-9]*\) ready$/\1/p' "$scratch/ready")
  [[ -n $ready ]] || return 1
  if [[ $workers == all ]]; then
    count=$(ask tpu-vm describe "$NAME" --format='value(networkEndpoints.len())') \
      || return
    [[ $count =~ ^[1-9][0-9]*$ ]] || return 1
    workers=$(seq 0 $((count - 1)))
  fi
  workers=$(tr ',' '\n' <<<"$workers" | grep -vxF "$ready" | paste -sd, -) || true
  [[ -z $workers ]] || { say "not set up: host $workers"; return 1; }
}

setup() {
  local archive=$scratch/tepo.tgz packages=${PACKAGES:-} workers=all steps
  [[ -z ${WANDB_API_KEY:-} || -n $packages ]] || packages=wandb
  # Status 1: a file grew meanwhile, such as the output of a run here.
  do_it tar -czf "$archive" --exclude=__pycache__ --exclude='./.*' \
    --exclude=./runs --exclude=./bucket --exclude='./*.log' . || [[ $? -eq 1 ]] \
    || return
  # The archive's name is new, so that none of an earlier setup is taken for it.
  steps="mkdir -p tepo && tar -xzf tepo.$$.tgz -C tepo && rm tepo.*.tgz \
&& SKIP_SELFTEST=1 PACKAGES=$(printf %q "$packages") tepo/launch/setup.sh tpu"
  [[ -z ${BUCKET:-} ]] \
    || steps+=" && tepo/launch/tpu_host.sh mount $(printf %q "$BUCKET")"
  repeat set_up_hosts
}

setup_failed() {
  warn_of_cost
  fail "a host could not be set up, see above"
}

# Copies the variables that are passed on to a file of each host.
pass_variables() {
  local name file=$scratch/tepo.env
  for name in HF_TOKEN WANDB_API_KEY ${PASS:-}; do
    [[ -z ${!name:-} ]] || printf 'export %s=%q\n' "$name" "${!name}"
  done >"$file"
  [[ ! -s $file ]] || repeat send "$file" tepo.env all
}

run() {
  pass_variables || fail "the variables could not be copied to a host"
  local status=0
  explained start_program start || status=$?
  [[ $status -eq 0 ]] || { warn_of_cost; exit "$status"; }
  done_with "$program was started on $NAME" "logs, and then wait"
}

start_program() {
  on_hosts all "tepo/launch/tpu_host.sh $1 $program \
$(printf '%q ' "${arguments[@]}")"
}

stop() { on_hosts all "tepo/launch/tpu_host.sh stop"; }

# Prints what hosts run; one that was restarted keeps the command that it ran before.
commands_in_progress() {
  { on_hosts all "! tepo/launch/tpu_host.sh report | grep -q ' running\$' \
|| cat tepo/job.command" 2>/dev/null || true; } | sort -u
}

# Makes the program run on all hosts of an active slice; returns with status 1 if
# there is none to be had now.
start() {
  local status=0 other
  read_state
  if [[ $state == ACTIVE ]]; then
    poll
    if [[ $verdict =~ ^(running|incomplete)$ ]]; then
      check_same
      other=$(commands_in_progress | grep -vxF -e "$program ${arguments[*]}") || other=
      [[ -z $other ]] || fail "another program is in progress: $other"
    fi
    if [[ $verdict == running ]]; then
      say "waiting for the program in progress"
      return 0
    fi
  fi
  [[ ! $state =~ $gone ]] || repeat delete || fail "the slice is not deleted"
  request || status=$?
  if is_refused "$status"; then
    [[ $status -ne 2 ]] || cause=
    fail "there will be no slice: ${cause:-see above}"
  fi
  [[ $status -eq 0 ]] || return 1
  if ! setup; then
    read_state
    [[ -z $state || $state =~ $gone ]] && return 1
    setup_failed
  fi
  { pass_variables && start_program resume; } || say "a host did not start the program"
}

watch() {
  local misses=0 remakes=0 seconds
  while :; do
    if ! start; then
      seconds=$(( ${PAUSE:-30} << (misses < 5 ? misses : 5) ))
      misses=$((misses + 1))
      say "no slice now; trying again in $seconds s"
      sleep "$seconds"
      continue
    fi
    misses=0
    follow eager
    [[ -z $dry_run ]] || return 0
    case $verdict in
      taken) say "$NAME was taken away ($state); starting again" ;;
      42 | incomplete) say "interrupted; starting again" ;;
      bare | idle) say "no program on $NAME; starting again" ;;
      0 | 1 | 2 | stopped) finish ;;
      *)
        remakes=$((remakes + 1))
        [[ $remakes -le 3 ]] || finish
        on_hosts all "tepo/launch/tpu_host.sh last" >&2 || true
        [[ $verdict == unreachable ]] \
          || say "status $verdict on a host, restarted five times"
        say "making the slice anew ($remakes of 3)"
        repeat delete || fail "the slice is not deleted" ;;
    esac
    pause
  done
}

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

# logs N|all: may run for hours, so what it needs is checked before, and its stderr
# is shown at once.
logs() {
  need_slice
  if [[ -z $dry_run ]]; then
    poll
    [[ ! $verdict =~ ^(bare|idle)$ ]] || refuse_idle
  fi
  case $1 in
    all) on_hosts all "tepo/launch/tpu_host.sh logs" ;;
    *) on_hosts "$1" "[ -e tepo/job.log ] && tail -n 100 -F tepo/job.log" ;;
  esac
}

fetch() {
  do_it mkdir -p "$(dirname "$1")"
  remote scp --recurse "$NAME:tepo/$1" "$(dirname "$1")" --worker=0
}

commands='types|create|setup|run|wait|watch|logs|fetch|stop|delete'
dry_run=
if [[ ${1:-} == --dry-run ]]; then dry_run=yes; shift; fi
command=${1:-}
[[ $command =~ ^($commands)$ ]] \
  || fail "usage: launch/tpu_vm.sh [--dry-run] $commands"
shift
case $command in
  run | watch) parse_run "$@" ;;
  fetch)
    [[ $# -eq 1 ]] || fail "fetch needs one path"
    [[ $1 != gs://* ]] || fail "$1 is on no host: gcloud storage cp -r $1 ." ;;
  logs) [[ $# -eq 0 || $* =~ ^([0-9]+|all)$ ]] || fail "logs takes N or all" ;;
  *) [[ $# -eq 0 ]] || fail "unexpected argument '$1'" ;;
esac
if [[ $command == types ]]; then types; exit; fi
for name in NAME ZONE PROJECT; do
  [[ -n ${!name:-} ]] || fail "$name is not set in the environment"
done
[[ ! $command =~ ^(create|watch)$ ]] || check_type
where=(--project="$PROJECT" --zone="$ZONE" --quiet)
read -ra create_flags <<<"${CREATE_FLAGS:-}"
read -ra ssh_flags <<<"${SSH_FLAGS:-}"
[[ -n $dry_run ]] || command -v gcloud >/dev/null || fail "no gcloud:" \
  "https://cloud.google.com/sdk/docs/install"
umask 077  # for the variables that are passed on
scratch=$(mktemp -d)
said=$scratch/said
trap 'rm -rf "$scratch"' EXIT

case $command in
  wait) wait_for_program ;;
  setup)
    need_slice
    setup || setup_failed
    done_with "$NAME is set up" "run --config=… --workdir=gs://…" ;;
  run) need_slice; run ;;
  stop) explained stop ;;
  logs) logs "${1:-0}" ;;
  fetch) umask 022; explained fetch "$1" ;;
  *) "$command" ;;
esac
