#!/usr/bin/env bash
# How launch/tpu_vm.sh, which sources this, waits for the program on the hosts.
# shellcheck disable=SC2154  # launch/tpu_vm.sh sets the variables
set -euo pipefail

# Sets `verdict`: running, unreachable (a host does not answer), incomplete (some
# hosts run the program, others were restarted), stopped (by `stop`), a status,
# or, where no host was given a program, bare (a host is not set up) or idle.
poll() {
  local reached=yes states
  states=$(on_hosts all "tepo/launch/tpu_host.sh report \
|| { [ ! -e tepo/launch/tpu_host.sh ] && echo \"tepo: \$HOSTNAME bare\"; }" \
    2>"$scratch/polled") || reached=
  if [[ -n $dry_run ]]; then echo "$states"; verdict=0; return; fi
  states=$(sed -n 's/^tepo: .* //p' <<<"$states" | sort -n | uniq)
  # If one failed, the others know only that a process is lost.
  verdict=$(grep -m 1 -vE '^(0|42|running|lost|stopped|bare|idle)$' \
    <<<"$states") \
    && [[ -n $verdict ]] && return
  if [[ -z $reached ]]; then verdict=unreachable
  elif [[ $states == 0 || $states == bare || $states == idle ]]; then
    verdict=$states
  elif [[ $states == bare$'\n'idle ]]; then verdict=bare
  elif [[ $states == *running* ]]; then
    verdict=running
    [[ ! $states =~ 42|lost|bare|idle ]] || verdict=incomplete
  elif [[ $states == *stopped* ]]; then verdict=stopped
  else verdict=42
  fi
}

# Polls until the program has ended on all hosts or failed on one; sets `verdict`
# also to taken. Returns too if a host of an active slice stays unreachable and,
# with `eager`, if the program stays incomplete: a host that still saves is no
# reason to start the others again.
follow() {
  local count=0 last=
  while :; do
    last=${verdict:-}
    poll
    [[ $verdict == "$last" ]] && count=$((count + 1)) || count=1
    case $verdict in
      running) ;;
      unreachable)
        read_state
        need_request
        if [[ $state =~ $gone ]]; then verdict=taken; return; fi
        [[ $state != ACTIVE || $count -lt 20 ]] || return 0
        if [[ $count -eq 1 ]]; then
          cat "$scratch/polled" >&2
          say "a host does not answer; $NAME is $state"
        fi ;;
      incomplete)
        [[ $1 != eager || $count -lt 3 ]] || return 0
        [[ $1 == eager || $count -ne 3 ]] || say "a host was restarted: the" \
          "others cannot resume without it; stop, setup if BUCKET was mounted," \
          "and the same run" ;;
      *) return 0 ;;
    esac
    pause
  done
}

# Ends, since `verdict` says that the hosts have no program.
refuse_idle() {
  local steps='run'
  [[ $verdict == idle ]] || steps='setup, then run'
  fail "nothing was started on $NAME: launch/tpu_vm.sh $steps"
}

# Shows every host's last line, stops hosts that would restart the program, and
# exits with the program's status.
finish() {
  on_hosts all "tepo/launch/tpu_host.sh last" >&2 || true
  if [[ $verdict == stopped ]]; then verdict=42; fi
  warn_of_cost
  case $verdict in
    0) say "the program is complete" ;;
    42) say "interrupted: the same run resumes" ;;
    unreachable) fail "a host does not answer" ;;
    *)
      stop >/dev/null 2>&1 || true
      say "status $verdict; see launch/tpu_vm.sh logs all, and /tmp/tpu_logs on" \
        "the hosts for what the TPU's library says" ;;
  esac
  exit "$verdict"
}

wait_for_program() {
  read_state
  [[ -n $dry_run ]] || check_requested
  follow patient
  case $verdict in
    taken)
      say "$NAME is $state: $remake"
      exit 42 ;;
    bare | idle) refuse_idle ;;
  esac
  [[ -n $dry_run ]] || finish
}
