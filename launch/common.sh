#!/usr/bin/env bash
# What the scripts share, which source this from the repository's folder: the command
# line for a message, and --help, which prints the script's head comment.
set -euo pipefail

# command_line 'NAME ...' COMMAND ARGUMENT...: prints, quoted for a shell, those of the
# variables that are set, the command and its arguments.
command_line() {
  local name
  for name in $1; do
    [[ -z ${!name:-} ]] || printf '%s=%q ' "$name" "${!name}"
  done
  printf %s "$2"
  for name in "${@:3}"; do printf ' %q' "$name"; done
}

# attend COMMAND...: runs the command and returns its status. SIGTERM is passed on to
# the command by stop_child, or by the function that `stop_by` names; Ctrl-C reaches it
# from the terminal. Once the command has saved and ended, these end this script with
# status 42 or 130.
child='' stopped='' stop_by=''
stop_child() { [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true; }
attend() {
  local status=0
  trap 'stopped=130' INT
  trap 'stopped=42; ${stop_by:-stop_child}' TERM
  (trap - INT; exec "$@") <&0 &
  child=$!
  [[ -z $stopped ]] || ${stop_by:-stop_child}
  wait "$child" || status=$?
  # A signal ends `wait` before the child has exited.
  while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
  child=''
  [[ -z $stopped ]] || exit "$stopped"
  return "$status"
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  sed -n '2,/^set /{/^#SBATCH/d;s/^# \{0,1\}//p;}' \
    "$(dirname "${BASH_SOURCE[0]}")/${0##*/}"
  exit
fi
