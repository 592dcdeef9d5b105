#!/usr/bin/env bash
# Runs a command, and again where it was killed or lost another process of its
# job. What ended by itself (status 0, 1 or 2) has ended.
#
#   [RESTARTS=20] [PAUSE=10] launch/supervise.sh COMMAND...
#
# SIGTERM is passed on, and nothing is started again.
set -euo pipefail
child='' stopped=''
trap 'stopped=yes; [[ -z $child ]] || kill -TERM "$child" || true' TERM

for (( left = ${RESTARTS:-20}; ; left-- )); do
  [[ -z $stopped ]] || exit 0
  "$@" &
  child=$! status=0
  wait "$child" || status=$?
  # A signal ends `wait` before the child has ended.
  while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
  done
  child=''
  if (( status <= 2 || left == 0 )) || [[ -n $stopped ]]; then
    exit "$status"
  fi
  echo "launch/supervise.sh: ended with status $status; starting it again" >&2
  sleep "${PAUSE:-10}" &
  wait $! || true
done
