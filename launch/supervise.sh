#!/usr/bin/env bash
# Runs a command and restarts it if it is killed or loses another process of its
# job, but not if it exits with status 0, 1 or 2.
#
#   [RESTARTS=20] [PAUSE=10] [STATUS=FILE] launch/supervise.sh COMMAND...
#
# SIGTERM is passed on to the command, which is then not restarted. PAUSE is in
# seconds. STATUS is a file for the exit status.
set -euo pipefail
child='' stopped=''
trap 'echo $? >"${STATUS:-/dev/null}"' EXIT
trap 'stopped=yes; [[ -z $child ]] || kill -TERM "$child" || true' TERM

for (( left = ${RESTARTS:-20}; ; left-- )); do
  [[ -z $stopped ]] || exit 0
  "$@" &
  child=$! status=0
  wait "$child" || status=$?
  # A signal ends `wait` before the child has exited.
  while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
  done
  child=''
  if (( status <= 2 || left == 0 )) || [[ -n $stopped ]]; then
    exit "$status"
  fi
  echo "launch/supervise.sh: exited with status $status; restarting" >&2
  sleep "${PAUSE:-10}" &
  wait $! || true
done
