"""Runs the launch scripts with stand-ins for python, apt-get, nvidia-smi and
gcloud."""

import os
import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[1]

PYTHON = '''#!/bin/bash
case "$*" in
  *"import ensurepip"*) [[ -e "$STUBS/venv_is_there" ]] ;;
  *"%d.%d-venv"*) echo python3.11-venv ;;
  "-c"*) exit 0 ;;
  "--version") echo Python 3.11 ;;
  "-m venv --clear .venv")
    mkdir -p .venv/bin && cp "$STUBS/venv_python" .venv/bin/python ;;
esac
'''
VENV_PYTHON = '''#!/bin/bash
case "$*" in
  "-m pip --version") ;;
  "-m pip show"*) exit 1 ;;
  *) echo "python $*" >>"$STUBS/log"
     [[ "$*" != *"pip install"* ]] || echo "a warning of pip" | tee /dev/stderr
     [[ ! -e "$STUBS/pip_fails" ]] ;;
esac
'''
APT = '#!/bin/bash\necho "apt-get $*" >>"$STUBS/log"\ntouch "$STUBS/$APT_DOES"'
DRIVER = '#!/bin/bash\n[[ -n $DRIVER ]] && echo "$DRIVER"'


def prepare(tmp_path):
  """A function that runs a script of a copy of the repository, from another
  folder, with the stand-ins: its `root`, the copy; `stubs`, their folder;
  `log`, which takes the lines that they have logged."""
  root, stubs = tmp_path / 'a folder', tmp_path / 'stubs'
  for name in ('launch', 'requirements.txt', 'tests/requirements.txt'):
    copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    copy(ROOT / name, root / name)
  stubs.mkdir()
  for name, text in {'python3': PYTHON, 'venv_python': VENV_PYTHON,
                     'apt-get': APT, 'nvidia-smi': DRIVER,
                     'sudo': '#!/bin/bash\n"$@"'}.items():
    (stubs / name).write_text(text)
    (stubs / name).chmod(0o755)

  def launch(script, *arguments, **environment):
    return subprocess.run(
        [root / 'launch' / script, *arguments], cwd='/', text=True,
        capture_output=True, timeout=60,
        env={'PATH': f'{stubs}:{os.environ["PATH"]}', 'STUBS': str(stubs),
             'HOME': str(tmp_path), 'APT_DOES': 'venv_is_there'} | environment)

  def log():
    path = stubs / 'log'
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines

  launch.root, launch.stubs, launch.log = root, stubs, log
  return launch


SLICE = {'NAME': 'n', 'ZONE': 'z', 'PROJECT': 'p', 'TYPE': 'v6e-8'}

# A slice of as many hosts as $STUBS/hosts says, in folders $STUBS/host0, …;
# files of $STUBS say what happens:
#   state, node   of the queued resource (missing if there is none) and its node
#   refusals      how many creates are refused, with the text of `refusal`
#   creates       lines: the states that the next requests enter, else ACTIVE
#   errors        lines that the next calls print, and fail
#   host0/down    that host does not answer; a number: so many times
#   deletes       how many deletes are refused
#   node_error    what describing the node prints, and fails
_GCLOUD = r"""#!/bin/bash
echo "$*" >>"$STUBS/gcloud_log"
if [[ $* != *"compute tpus"* ]]; then
  [[ $* != *"projects describe"* ]] || echo 123
  exit
fi
[[ " $* " == *" --quiet "* ]] || { echo "Do you want to continue?"; exit 9; }
if [[ -s $STUBS/errors ]]; then
  head -n 1 "$STUBS/errors" >&2; sed -i 1d "$STUBS/errors"; exit 1
fi
none="ERROR: (gcloud.compute.tpus) NOT_FOUND: Resource 'n' was not found"
state() { cat "$STUBS/state" 2>/dev/null || { echo "$none" >&2; exit 1; }; }
answers() {
  local down=$STUBS/host$1/down left
  [[ $(state 2>&1) == ACTIVE ]] || return 1
  [[ -e $down ]] || return 0
  left=$(cat "$down")
  if [[ $left == 1 ]]; then rm "$down"
  elif [[ -n $left ]]; then echo $((left - 1)) >"$down"
  fi
  return 1
}
describe() {
  local state code message
  IFS='|' read -r state code message
  printf '{\n  "name": "n",\n%s  "state": {\n' \
    "$(grep -s spot "$STUBS/request" && echo ' ')"
  [[ -z $code ]] || printf '    "failedData": {\n      "error": {
        "code": %s,\n        "message": "%s"\n      }\n    },\n' \
    "$code" "${message//\"/\\\"}"
  printf '    "state": "%s"\n  },\n  "tpu": {\n    "nodeSpec": [\n      {
        "node": {\n%s\n          "state": "CREATING"
        }\n      }\n    ]\n  }\n}\n' "$state" \
    "$(grep -s acceleratorType "$STUBS/request")"
}
on_host() {
  answers "$1" || { echo "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) \
[/usr/bin/ssh] exited with return code [255]." >&2; return 255; }
  cd "$STUBS/host$1" && HOST=$1 HOSTNAME=t1v-n-w-$1 bash -c "$2"
}
worker=0
for argument; do
  case $argument in
    --worker=*) worker=${argument#*=} ;;
    --command=*) text=${argument#*=} ;;
  esac
done
count=$(cat "$STUBS/hosts" 2>/dev/null || echo 1) some=
# If a command of some but not all workers fails, gcloud may exit with 0.
[[ $worker != *,* ]] || some=yes worker=${worker//,/ }
[[ $worker != all ]] || worker=$(seq 0 $((count - 1)))
status=0
case "$*" in
  *"queued-resources describe"*) state >/dev/null; state | describe ;;
  *"tpu-vm describe"*networkEndpoints*) echo "$count" ;;
  *"tpu-vm describe"*)
    ! cat "$STUBS/node_error" >&2 2>/dev/null || exit 1
    cat "$STUBS/node" 2>/dev/null || echo READY ;;
  *" create "*)
    left=$(cat "$STUBS/refusals" 2>/dev/null || echo 0)
    if (( left > 0 )); then
      echo $((left - 1)) >"$STUBS/refusals"
      cat "$STUBS/refusal" >&2; exit 1
    fi
    type=$* type=${type#*--accelerator-type=}
    { [[ " $* " != *" --spot "* ]] || echo '  "spot": {},'
      echo "          \"acceleratorType\": \"${type%% *}\","
    } >"$STUBS/request"
    new=$(head -n 1 "$STUBS/creates" 2>/dev/null)
    [[ -z $new ]] || sed -i 1d "$STUBS/creates"
    echo "${new:-ACTIVE}" >"$STUBS/state"
    rm -f "$STUBS/node"
    for host in $worker {0..3}; do mkdir -p "$STUBS/host$host"; done ;;
  *" delete "*)
    state >/dev/null
    left=$(cat "$STUBS/deletes" 2>/dev/null || echo 0)
    echo $((left > 0 ? left - 1 : 0)) >"$STUBS/deletes"
    (( left == 0 )) || { echo "ERROR: FAILED_PRECONDITION" >&2; exit 1; }
    rm -rf "$STUBS/state" "$STUBS"/host? ;;
  *" ssh "*)
    cat >/dev/null  # as ssh does
    echo "SSH: Attempting to connect to worker 0..." >&2
    for host in $worker; do (on_host "$host" "$text") || status=$?; done ;;
  *" scp --recurse "*) cp -r "$STUBS/host0/${6#*:}" "$7" || status=1 ;;
  *" scp "*)
    for host in $worker; do
      answers "$host" && cp -p "$5" "$STUBS/host$host/${6#*:}" || status=255
    done ;;
esac
[[ -n $some ]] || exit $status
"""
# Does what the first line of $STUBS/does<HOST> says, which it removes: ends
# with a status, waits for $STUBS/go, or takes its host or slice away.
_PROGRAM = r"""#!/bin/bash
[[ "$*" == *tepo_jax* ]] || exit 0
echo "$TEPO_MULTIHOST $*" >>"$STUBS/log"
echo "w$HOST ${HF_TOKEN:+with a token }$*" >>"$STUBS/hosts_log"
for argument; do case $argument in --out=*)
  mkdir -p "${argument#--out=}"; echo done >"${argument#--out=}/results.json" ;;
esac; done
does=$(head -n 1 "$STUBS/does$HOST" 2>/dev/null)
[[ -z $does ]] || sed -i 1d "$STUBS/does$HOST"
case $does in
  wait) until [[ -e $STUBS/go ]]; do sleep .05; done ;;
  go) touch "$STUBS/go" ;;
  taken) echo SUSPENDED >"$STUBS/state"; sleep 1 ;;
  preempted)
    echo PREEMPTED >"$STUBS/node"; touch "$STUBS/host0/down"; sleep 1 ;;
  unreachable) touch "$STUBS/host$HOST/down"; sleep 1 ;;
  restart) kill -KILL "$PPID" ;;
  save) trap 'echo saved; exit 42' TERM
        while :; do sleep .05; done ;;
  ?*) echo "error: status $does of host $HOST"; exit "$does" ;;
esac
[[ "$*" != *seed=7* ]]
"""


def make_slice(launch):
  """A function that runs tpu_vm.sh with the stand-in for gcloud, and programs
  that do what files say."""
  for name, text in (
      ('gcloud', _GCLOUD), ('venv_python', _PROGRAM),
      ('mountpoint', '#!/bin/bash\n[[ ! -e $STUBS/unmounted ]]\n')):
    (launch.stubs / name).write_text(text)
    (launch.stubs / name).chmod(0o755)
  for name in ('tepo_jax', 'configs', 'tests'):
    (launch.root / name).mkdir(exist_ok=True)
  (launch.stubs / 'venv_is_there').touch()
  return lambda *arguments, **environment: launch(
      'tpu_vm.sh', *arguments, **SLICE | {'PAUSE': '0.1'} | environment)
