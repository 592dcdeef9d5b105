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

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  sed -n '2,/^set /{/^#SBATCH/d;s/^# \{0,1\}//p;}' \
    "$(dirname "${BASH_SOURCE[0]}")/${0##*/}"
  exit
fi
