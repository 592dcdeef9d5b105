"""A slice of two hosts, which are folders here: two rows of a table by the
sweep, and a run that is interrupted in every way."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests import jobs
from tests import runs

pytestmark = pytest.mark.long

# A slice of two hosts, folders of this machine, whose devices are CPUs. They
# mount the same bucket; programs that start together share a port, or all do.
# Nothing is copied to the hosts: they have links to this repository.
_GCLOUD = r"""#!/bin/bash
run_on() {
  (cd "$SLICE/host$1" && JAX_COORDINATOR_ADDRESS=${HOST0:-localhost}:$2 \
    JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=$1 JAX_PLATFORMS=cpu HOSTNAME=w-$1 \
    ${NETWORK:+ip netns exec "$NETWORK$1"} bash -c "$3")
}
case "$*" in
  *queued-resources*describe*)
    printf '{\n  "state": {\n    "state": "ACTIVE"\n  }\n}\n' ;;
  *describe*) echo READY ;;
  *"tar -xzf"*) ;;
  *" ssh "*)
    for argument; do case $argument in
      --command=*) command=${argument#--command=} ;;
      --worker=all) workers='0 1' ;;
      --worker=*) workers=${argument#--worker=} ;;
    esac; done
    port=${PORT:-$(python3 -c 'import socket; s = socket.socket()
s.bind(("localhost", 0)); print(s.getsockname()[1])')}
    status=0
    for worker in $workers; do
      run_on "$worker" "$port" "$command" || status=$?
    done
    exit $status ;;
  *" scp --recurse "*) cp -r "$SLICE/host0/${6#n:}" "$7" ;;
esac
"""

_SMALL = (
    '--config.steps=1', '--config.data.name=arithmetic',
    '--config.data.limit=16', '--config.data.template=plain',
    '--config.data.max_prompt_tokens=24', '--config.rollout.prompts=2',
    '--config.rollout.samples=4', '--config.rollout.max_tokens=12',
    '--config.rollout.dynamic_sampling=off',
    '--config.rollout.overlong_buffer=11',
    '--config.train.minibatch_prompts=2', '--config.train.epochs=1',
    '--config.train.microbatch_tokens=72', '--config.compute.dtype=float32',
    '--config.rollout.tensor=1', '--config.grading.workers=1',
    '--config.eval.period=9', '--config.eval.samples=2',
    '--config.eval.temperature=1.0',
    '--config.eval.max_tokens=12')


def _tree(folder, bucket=None):
  """A folder that looks like this repository."""
  folder.mkdir(parents=True)
  for name in ('launch', 'tepo_jax', 'configs'):
    (folder / name).symlink_to(runs.ROOT / name)
  (folder / '.venv').symlink_to(pathlib.Path(sys.executable).parents[1])
  if bucket is not None:
    (folder / 'bucket').symlink_to(bucket)
  return folder


def test_the_sweep_makes_two_rows_on_two_processes(tmp_path):
  model, bucket = tmp_path / 'model', tmp_path / 'bucket'
  runs.make_model(model)
  problems = tmp_path / 'aime.jsonl'
  problems.write_text(''.join(json.dumps(
      {'problem': f'Start with 1 (1) + {i}.', 'answer': str(1 + i)}) + '\n'
                              for i in range(3)))
  bucket.mkdir()
  here = _tree(tmp_path / 'here')
  hosts = [_tree(tmp_path / f'host{i}' / 'tepo', bucket) for i in range(2)]
  (tmp_path / 'bin').mkdir()
  (tmp_path / 'bin/gcloud').write_text(_GCLOUD)
  (tmp_path / 'bin/gcloud').chmod(0o755)
  (tmp_path / 'bin/mountpoint').symlink_to('/bin/true')

  listed = runs.run('report', '--table=3', f'--runs={here}/bucket/r',
                    '--commands').stdout
  folders = [pathlib.Path(line.rpartition('--out=')[2])
             for line in listed.splitlines() if '.evaluate ' in line]
  for folder in folders[2:]:  # as if they were there
    folder.mkdir(parents=True)
    (folder / 'results.json').write_text(
        json.dumps({'sets': {}, 'first_decodings': []}))
  done = subprocess.run(
      [here / 'launch/sweep.sh', '--slice', 'table3', *_SMALL,
       f'--config.model={model}', f'--config.eval.sets=("aime24:{problems}",)'],
      env=os.environ | {
          'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}', 'NAME': 'n',
          'ZONE': 'z', 'PROJECT': 'p', 'TYPE': 'v6e-8', 'RUNS': 'bucket/r',
          'PAUSE': '0.2', 'SLICE': str(tmp_path),
          'XLA_FLAGS': _ONE_DEVICE},
      text=True, capture_output=True, timeout=1000)
  logs = [(host / 'job.log').read_text() for host in hosts]
  assert done.returncode == 0, (done.stderr, logs)
  for folder in folders[:2]:
    made = bucket / folder.relative_to(here / 'bucket')
    fetched = json.loads((folder / 'results.json').read_text())
    assert fetched == json.loads((made / 'results.json').read_text())
    assert fetched['sets']['aime24']['problems'] == 3
    [start] = map(json.loads, (
        made.parent / 'environment.jsonl').read_text().splitlines())
    assert start['processes'] == 2
    assert (made.parent / 'checkpoints/1').is_dir()
  # tepo_no_kl stands in the table twice, kl_1 once.
  assert done.stdout.count('\n| ours | 0.00 | not run |') == 3, done.stdout


_ONE_DEVICE = (
    f'--xla_force_host_platform_device_count=1 {runs.QUICK_FUSIONS}')
_RUN = ('--config=configs/tiny.py:tepo',
        *(flag for flag in _SMALL if 'eval.' not in flag), '--config.steps=4',
        '--config.eval.period=0', '--config.checkpoint.period=1',
        '--config.pretrain.num_layers=1',
        '--config.pretrain.worked_steps=1', '--config.pretrain.mixed_steps=1')
# A host whose device is held as often as the file `sick` says.
_SICK = """#!/bin/bash
left=$(cat sick 2>/dev/null || echo 0)
if (( left > 0 )); then
  echo $((left - 1)) >sick
  echo "error: Unable to initialize backend 'tpu': Device or resource busy"
  exit 3
fi
exec {python} "$@"
"""


@pytest.fixture
def network():
  """Two hosts with networks of their own, joined by a cable: the stand-in's
  variables. Without the right to make them, the hosts share this machine's."""
  name, address = f'tepo{os.getpid()}_', '10.77.0.'
  # What `ip netns exec` puts in the place of /etc/hosts: Gloo connects to the
  # addresses of the hosts' names.
  hosts = [pathlib.Path(f'/etc/netns/{name}{i}/hosts') for i in range(2)]

  def ip(*arguments):
    return subprocess.run(['ip', *arguments], capture_output=True).returncode

  if not shutil.which('ip') or ip('netns', 'add', f'{name}0'):
    yield {}
    return
  try:
    assert not ip('netns', 'add', f'{name}1')
    assert not ip('link', 'add', 'eth0', 'netns', f'{name}0', 'type', 'veth',
                  'peer', 'name', 'eth0', 'netns', f'{name}1')
    for i in range(2):
      host = '-n', f'{name}{i}'
      assert not ip(*host, 'addr', 'add', f'{address}{i + 1}/24', 'dev', 'eth0')
      assert not ip(*host, 'link', 'set', 'lo', 'up')
      assert not ip(*host, 'link', 'set', 'eth0', 'up')
      hosts[i].parent.mkdir(parents=True)
      hosts[i].write_text(f'127.0.0.1 localhost\n'
                          f'{address}{i + 1} {socket.gethostname()}\n')
    yield {'NETWORK': name, 'HOST0': f'{address}1'}
  finally:
    for i in range(2):
      ip('netns', 'del', f'{name}{i}')
      shutil.rmtree(hosts[i].parent, ignore_errors=True)


def _steps(workdir):
  file = workdir / 'metrics.jsonl'
  return file.read_text().count('\n') if file.exists() else 0


def _wait_for_step(workdir, step, watch):
  deadline = time.monotonic() + 600
  while _steps(workdir) < step:
    assert watch.poll() is None and time.monotonic() < deadline
    time.sleep(0.05)


def _processes_in(folder):
  """Ids of the processes that work in a folder."""
  for entry in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      if (entry / 'cwd').resolve().is_relative_to(folder):
        yield int(entry.name)
    except OSError:
      pass  # it has ended


def test_watch_brings_a_run_through_interruptions(tmp_path, network):
  """A sick device, SIGTERM to a host, a restart of a host: the run ends like
  one that nothing interrupted, to the bit, without a person."""
  whole, workdir = tmp_path / 'whole', tmp_path / 'run'
  outcomes = jobs.finish(jobs.start(
      2, ['-m', 'tepo_jax.train'], *_RUN, f'--workdir={whole}', devices=1,
      JAX_PLATFORMS='cpu'), 600)
  assert [status for status, *_ in outcomes] == [0, 0], outcomes
  here = _tree(tmp_path / 'here')
  hosts = [_tree(tmp_path / f'host{i}' / 'tepo') for i in range(2)]
  for host in hosts:
    (host / '.venv').unlink()
    (host / '.venv/bin').mkdir(parents=True)
    python = host / '.venv/bin/python'
    python.write_text(_SICK.format(python=sys.executable))
    python.chmod(0o755)
  (hosts[1] / 'sick').write_text('2')
  (tmp_path / 'bin').mkdir()
  (tmp_path / 'bin/gcloud').write_text(_GCLOUD)
  (tmp_path / 'bin/gcloud').chmod(0o755)
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    port = probe.getsockname()[1]
  said = tmp_path / 'said'
  with open(said, 'w', encoding='utf-8') as file:
    watch = subprocess.Popen(
        [here / 'launch/tpu_vm.sh', 'watch', *_RUN, f'--workdir={workdir}'],
        stderr=file, env=os.environ | {
            'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}', 'NAME': 'n',
            'ZONE': 'z', 'PROJECT': 'p', 'TYPE': 'v6e-16', 'PAUSE': '1',
            'SLICE': str(tmp_path), 'PORT': str(port),
            'XLA_FLAGS': _ONE_DEVICE}
        | network)
  try:
    _wait_for_step(workdir, 1, watch)
    os.kill(int((hosts[1] / 'job.pid').read_text()), signal.SIGTERM)
    _wait_for_step(workdir, _steps(workdir) + 1, watch)
    for process in _processes_in(tmp_path / 'host1'):
      os.kill(process, signal.SIGKILL)
    assert watch.wait(600) == 0, said.read_text()
  finally:
    watch.kill()
    for process in _processes_in(tmp_path):
      os.kill(process, signal.SIGKILL)
  logs = [(host / 'job.log').read_text() for host in hosts]
  assert logs[1].count('Device or resource busy') == 2
  assert said.read_text().count('interrupted; starting again') >= 2
  assert 'stopped by SIGTERM; step' in ''.join(logs)
  assert [*map(runs.untimed, runs.records(workdir))] == [
      *map(runs.untimed, runs.records(whole))]
  for file in whole.glob('rollouts/*'):
    assert file.read_bytes() == (workdir / 'rollouts' / file.name).read_bytes()
