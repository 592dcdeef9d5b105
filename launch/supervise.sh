#!/usr/bin/env bash
# Runs a command and restarts it if it is killed, loses another process of its
# job, cannot open the device or gets no answer from a bucket, but not after the
# statuses 0 (complete), 1 and 2 (failed), 42 (interrupted: steps are left), 126 and
# 127 (no such command).
#
#   [RESTARTS=20] [PAUSE=10] [STATUS=FILE] [DEVICES='/dev/accel* /dev/vfio/*'] \
#     launch/supervise.sh COMMAND...
#
# SIGTERM is passed on to the command, which is then not restarted; status 42
# unless the command ends with 0, 1 or 2. RESTARTS are those in a row: a command
# that has run for an hour starts the count anew. PAUSE is in seconds. STATUS is a
# file for the exit status.
#
# Before a restart, this user's processes in this folder that hold one of DEVICES
# are killed. If none holds them, libtpu's lock file is stale and is removed.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
if [[ ${1:--} == -* ]]; then
  echo 'usage: launch/supervise.sh COMMAND...' >&2
  exit 2
fi
child='' stopped=''
# shellcheck disable=SC2153  # STATUS is the caller's, status the command's
trap 'echo $? >"${STATUS:-/dev/null}"' EXIT
trap 'stopped=yes; [[ -z $child ]] || kill -TERM "$child" || true' TERM

# Prints the ids of this user's processes that hold one of the files.
holders() {
  local tests
  readarray -t tests < <(printf -- '-o\n-lname\n%s\n' "$@")
  find /proc/[0-9]*/fd -maxdepth 1 -uid "$UID" \( "${tests[@]:1}" \) \
    2>/dev/null | cut -d/ -f3 | sort -u
}

clear_device() {
  local id devices
  # shellcheck disable=SC2206  # patterns
  devices=(${DEVICES:-/dev/accel* /dev/vfio/*})
  [[ -e ${devices[0]} || -e ${devices[-1]} ]] || return 0  # no TPU
  for id in $(holders "${devices[@]}"); do
    [[ $(readlink "/proc/$id/cwd") == "$PWD" ]] || continue
    echo "launch/supervise.sh: killing process $id, which holds the device" >&2
    kill -KILL "$id" 2>/dev/null || true
  done
  [[ -n $(holders "${devices[@]}") ]] || rm -f /tmp/libtpu_lockfile 2>/dev/null || true
}

left=${RESTARTS:-20}
while [[ -z $stopped ]]; do
  begin=$SECONDS status=0
  "$@" &
  child=$!
  [[ -z $stopped ]] || kill -TERM "$child"
  wait "$child" || status=$?
  # A signal ends `wait` before the child has exited.
  while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
  done
  child=''
  (( SECONDS - begin < 3600 )) || left=${RESTARTS:-20}
  if (( status <= 2 || status == 42 || status == 126 || status == 127 )); then
    exit "$status"
  fi
  [[ -z $stopped ]] || break
  (( left > 0 )) || exit "$status"
  left=$((left - 1))
  clear_device
  echo "launch/supervise.sh: exited with status $status; restarting" >&2
  sleep "${PAUSE:-10}" &
  wait $! || true
done
exit 42
