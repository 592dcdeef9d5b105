#!/usr/bin/env bash
# How launch/tpu_vm.sh, which sources this, requests a slice and reads its state.
# shellcheck disable=SC2153,SC2154  # launch/tpu_vm.sh sets the variables
set -euo pipefail

# field NAME: prints its value in the `request`, of which gcloud writes a line each.
# It is unambiguous for the names below; `state` is also a field of nodes.
field() {
  local text
  text=$(sed -n "s/^ *\"$1\": //p" <<<"$request" | head -n 1)
  text=${text%,} text=${text#\"} text=${text%\"}
  echo "${text//\\\"/\"}"
}

# Sets `request` to what was requested, `state` to that of the slice, both empty if
# there is none, and `cause` and `code` to why the request failed. An active request
# may have lost its node.
read_state() {
  state='' code='' cause='' request=''
  [[ -z $dry_run ]] || return 0
  if ! request=$(ask queued-resources describe "$NAME" --format=json); then
    grep -q NOT_FOUND "$said" || { cat "$said" >&2; gcloud_failed; }
    return 0
  fi
  state=$(sed -n 's/^    "state": "\(.*\)",\{0,1\}$/\1/p' <<<"$request")
  [[ -n $state ]] || fail "gcloud's answer has no state: $request"
  code=$(field code) cause=$(field message)
  [[ $state == ACTIVE ]] || return 0
  state=$(ask tpu-vm describe "$NAME" --format='value(state)') \
    || { cat "$said" >&2
         grep -q NOT_FOUND "$said" || gcloud_failed
         state=TERMINATED; }
  [[ $state != READY ]] || state=ACTIVE
}

# Ends where it is unknown whether there is a slice.
gcloud_failed() {
  warn_of_cost "a slice that is there stays"
  fail "gcloud failed"
}

gone='^(FAILED|SUSPENDED|SUSPENDING|PREEMPTED|TERMINATED|STOPPED|STOPPING)$'
remake='launch/tpu_vm.sh delete, create (with the same SPOT), setup (with the same'
remake+=' BUCKET), and the same run, which resumes; watch, in place of run, does all this'
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
    || fail "$NAME is $state: $remake"
}

# Returns once the slice, whose state was read, is active; with status 1 if it will
# not be.
wait_for_slice() {
  local last='none'
  while :; do
    [[ $state == "$last" ]] || say "$NAME is ${state:-gone}${cause:+: $cause}"
    last=$state
    [[ $state != ACTIVE ]] || return 0
    [[ -n $state && ! $state =~ $gone ]] || return 1
    pause
    read_state
  done
}

# Ends if the slice that exists or is requested, by `request`, differs from TYPE and
# SPOT. A request for spot capacity has an empty message `spot`.
check_same() {
  local type is wanted
  type=$(field acceleratorType)
  is="TYPE=${type:-$TYPE}" wanted="TYPE=$TYPE"
  ! grep -qE '^ *"(spot|preemptible)": (\{\}|true)' <<<"$request" || is+=' SPOT=1'
  [[ -z ${SPOT:-} && " ${CREATE_FLAGS:-} " != *' --spot '* ]] \
    || wanted+=' SPOT=1'
  [[ $is == "$wanted" ]] || fail "$NAME exists with $is, not $wanted:" \
    "change the variables, or launch/tpu_vm.sh delete first"
}

# Requests the slice unless it is there; returns like wait_for_slice.
request() {
  local flags=() refusal=''
  [[ -z ${SPOT:-} ]] || flags=(--spot)
  read_state
  if [[ -n $state ]]; then
    [[ $state =~ $gone ]] || check_same
  else
    ask queued-resources create "$NAME" --node-id="$NAME" \
      --accelerator-type="$TYPE" --runtime-version="$(software)" \
      "${flags[@]}" "${create_flags[@]}" || refusal=$(<"$said")
    [[ -n $refusal && $refusal != *ALREADY_EXISTS* ]] || read_state
    if [[ -n $refusal && -z $state ]]; then  # also if a node of that name exists
      cause=$refusal
      echo "$cause" >&2
      return 2
    fi
  fi
  if [[ -n $dry_run ]]; then
    tpus queued-resources describe "$NAME" --format=json
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
  [[ $code =~ ^(3|5|6|7|9|16)$ ]]
}
