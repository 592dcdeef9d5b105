#!/usr/bin/env bash
# What launch/tpu_vm.sh runs on each host of a slice, in the copied repository.
#
#   launch/tpu_host.sh start|resume PROGRAM ARGUMENTS
#     starts the program under launch/supervise.sh and returns. Where one is in
#     progress, start ends with status 2, after 30 seconds of patience for one
#     that is ending, and resume leaves it alone
#   launch/tpu_host.sh mount BUCKET
#     mounts the bucket as bucket/ with Google's gcsfuse, in place of another
#   launch/tpu_host.sh report|last|logs|stop
#     report prints the program's state: running, stopped, its exit status,
#     lost, if it left none since the host was restarted, or idle, if none was
#     started; last prints the last line of its output; logs follows the output;
#     stop sends SIGTERM
#
# The files job.pid, job.log, job.status and job.command are in the repository's folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh

# By name: after a restart of the host another process may have the number.
in_progress() {
  grep -qsa launch/supervise.sh "/proc/$(cat job.pid 2>/dev/null)/cmdline"
}

# What launch/tpu_vm.sh passes on, such as HF_TOKEN, is for this run only.
take_variables() {
  # shellcheck source=/dev/null
  if [[ -f ../tepo.env ]]; then source ../tepo.env; rm ../tepo.env; fi
}

start() {
  local program=$1
  for _ in {1..30}; do in_progress || break; sleep 1; done
  if in_progress; then
    echo "a program is in progress here: stop it first" >&2
    exit 2
  fi
  if [[ "$*" == *=bucket/* ]] && ! mountpoint -q bucket; then
    echo "error: bucket/ is not mounted, as after a restart of the host: stop," \
      "setup with BUCKET=…, and the same run" | tee -a job.log >&2
    echo 2 >job.status
    exit 2
  fi
  echo "$*" >job.command
  rm -f job.status job.stopped
  # A stopped run prints this as the command that resumes.
  TEPO_COMMAND=$(command_line '' "launch/tpu_vm.sh run" "$@")
  export TEPO_COMMAND TEPO_REMARK="on your machine; launch/tpu_vm.sh watch resumes \
by itself"
  # nohup: the program survives a lost connection.
  STATUS=job.status RESTARTS=5 TEPO_MULTIHOST=1 \
    JAX_PLATFORMS=${JAX_PLATFORMS:-tpu,cpu} \
    nohup launch/supervise.sh .venv/bin/python -m "tepo_jax.$program" \
    "${@:2}" >>job.log 2>&1 </dev/null &
  echo $! >job.pid
}

mount_bucket() {
  local apt=https://packages.cloud.google.com/apt
  local key=/usr/share/keyrings/cloud.google.asc
  if ! command -v gcsfuse >/dev/null; then
    curl -fsS "$apt/doc/apt-key.gpg" | sudo tee "$key" >/dev/null
    echo "deb [signed-by=$key] $apt gcsfuse-$(lsb_release -cs) main" \
      | sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
    launch/setup.sh apt gcsfuse
  fi
  local mounted
  mounted=$(findmnt -rno SOURCE "$PWD/bucket") || true
  if [[ $mounted == "$1" && -d bucket/. ]]; then return; fi
  if [[ -n $mounted ]]; then  # another bucket, or one whose gcsfuse has died
    if in_progress; then
      echo "error: a program uses bucket/, which is $mounted: stop it first" >&2
      exit 2
    fi
    fusermount -u bucket
  fi
  mkdir -p bucket
  gcsfuse --implicit-dirs --rename-dir-limit=1000000 "$1" bucket
}

report() {
  local status=idle
  [[ ! -e job.command ]] || status=lost
  if in_progress; then
    status=running
  elif [[ -e job.status ]]; then
    status=$(<job.status)
    [[ $status != 42 || ! -e job.stopped ]] || status=stopped
  fi
  echo "tepo: $HOSTNAME $status"
}

case ${1:-} in
  start) take_variables; start "${@:2}" ;;
  resume) take_variables; in_progress || start "${@:2}" ;;
  mount) mount_bucket "$2" ;;
  report) report ;;
  last) echo "$HOSTNAME: $(tail -n 1 job.log 2>/dev/null)" ;;
  logs) [[ -e job.log ]] && tail -n 20 -F job.log | sed -u "s/^/$HOSTNAME: /" ;;
  stop)
    in_progress || { echo "$HOSTNAME: no program is in progress"; exit; }
    touch job.stopped
    kill -TERM "$(<job.pid)"
    echo "$HOSTNAME: asked to save and exit; wait ends once it has" ;;
  *) echo "usage: launch/tpu_host.sh start|resume|mount|report|last|logs|stop" >&2
     exit 2 ;;
esac
