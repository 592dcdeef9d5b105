#!/usr/bin/env bash
# How launch/tpu_vm.sh, which sources this, requests a slice and reads its state.
# shellcheck disable=SC2153,SC2154  # launch/tpu_vm.sh sets the variables
set -euo pipefail

# Sets `state` to that of the slice, empty if there is none, and `cause` and
# `code` to why its request failed. An active request may have lost its node.
read_state() {
  local answer
  state='' code='' cause=''
  [[ -z $dry_run ]] || return 0
  if ! answer=$(ask queued-resources describe "$NAME" --format="value[separator='|'](\
state.state,state.failedData.error.code,state.failedData.error.message)"); then
    grep -q NOT_FOUND "$said" || { cat "$said" >&2; fail "gcloud failed"; }
    return 0
  fi
  IFS='|' read -r state code cause <<<"${answer%%$'\n'*}"
  [[ $state == ACTIVE ]] || return 0
  state=$(ask tpu-vm describe "$NAME" --format='value(state)') \
    || { cat "$said" >&2
         grep -q NOT_FOUND "$said" || fail "gcloud failed"
         state=TERMINATED; }
  [[ $state != READY ]] || state=ACTIVE
}
gone='^(FAILED|SUSPENDED|SUSPENDING|PREEMPTED|TERMINATED|STOPPED|STOPPING)$'
waiting='^(ACCEPTED|CREATING|PROVISIONING|WAITING_FOR_RESOURCES)$'

# Ends if no slice was requested, according to `state`.
need_request() {
  [[ -n $state ]] || fail "there is no slice $NAME: launch/tpu_vm.sh create"
}

# Ends if no slice was requested, or none was given yet, according to `state`.
check_requested() {
  need_request
  [[ ! $state =~ $waiting ]] \
    || fail "$NAME is $state: launch/tpu_vm.sh create waits for it"
}

# Ends unless the slice is there.
need_slice() {
  read_state
  [[ -z $dry_run ]] || return 0
  check_requested
  [[ ! $state =~ $gone ]] \
    || fail "$NAME is $state: launch/tpu_vm.sh delete, create, setup"
}

# Returns once the slice is active; with status 1 if it will not be.
wait_for_slice() {
  local last='none'
  while :; do
    read_state
    [[ $state == "$last" ]] || say "$NAME is ${state:-gone}${cause:+: $cause}"
    last=$state
    [[ $state != ACTIVE ]] || return 0
    [[ -n $state && ! $state =~ $gone ]] || return 1
    pause
  done
}

# Ends if the slice that exists or is requested differs from TYPE and SPOT. Of
# gcloud's formats, value() does not show the empty message `spot` of a request.
check_same() {
  local answer type is wanted
  answer=$(ask queued-resources describe "$NAME" --format=yaml) \
    || { cat "$said" >&2; fail "gcloud failed"; }
  type=$(awk '$1 == "acceleratorType:" { print $2; exit }' <<<"$answer")
  is="TYPE=${type:-$TYPE}" wanted="TYPE=$TYPE"
  ! grep -qE '^ *(spot|preemptible): (\{\}|true)' <<<"$answer" || is+=' SPOT=1'
  [[ -z ${SPOT:-} && " ${CREATE_FLAGS:-} " != *' --spot '* ]] \
    || wanted+=' SPOT=1'
  [[ $is == "$wanted" ]] || fail "$NAME exists with $is, not $wanted:" \
    "change the variables, or launch/tpu_vm.sh delete first"
}

# Requests the slice unless it is there; returns like wait_for_slice.
request() {
  local flags=()
  [[ -z ${SPOT:-} ]] || flags=(--spot)
  read_state
  if [[ -n $state ]]; then
    [[ $state =~ $gone ]] || check_same
  else
    ask queued-resources create "$NAME" --node-id="$NAME" \
      --accelerator-type="$TYPE" --runtime-version="$(software)" \
      "${flags[@]}" "${create_flags[@]}" || {
        cause=$(<"$said")
        [[ $cause == *ALREADY_EXISTS* ]] || { echo "$cause" >&2; return 2; }; }
  fi
  if [[ -n $dry_run ]]; then
    tpus queued-resources describe "$NAME" --format='value(state.state)'
  else
    wait_for_slice
  fi
}

# What gcloud's create prints if there may be a slice later: the API has no
# capacity (8, 429) or failed (13, 14, 500, 503).
later='RESOURCE_EXHAUSTED|"code": (8|13|14|429|500|503)[^0-9]|[Nn]o more capacity'

# is_refused STATUS: whether it is in vain to ask again after request's STATUS:
# without a quota, a permission or a valid request, but not for want of capacity or
# of an answer (`network` of launch/tpu_vm.sh).
is_refused() {
  [[ $1 -ne 2 || ! $cause =~ $network ]] || return 1
  [[ ! $cause =~ [Qq]uota.*(limit|exceeded) ]] || return 0
  [[ $1 -ne 2 || $cause =~ $later ]] || return 0
  [[ $code =~ ^(3|5|7|9|16)$ ]]
}
