"""Two rows of a table, trained and evaluated by the sweep on two processes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import runs

pytestmark = pytest.mark.long

# A slice of two hosts, folders of this machine, whose devices are CPUs. They
# mount the same bucket; programs that start together share a port.
_GCLOUD = r"""#!/bin/bash
run_on() {
  (cd "$SLICE/host$1" && JAX_COORDINATOR_ADDRESS=localhost:$2 \
    JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=$1 \
    bash -c "${3//JAX_PLATFORMS=tpu,cpu/JAX_PLATFORMS=cpu}")
}
case "$*" in
  *describe*) echo ACTIVE ;;
  *" ssh "*)
    for argument; do case $argument in
      --command=*) command=${argument#--command=} ;;
      --worker=all) workers='0 1' ;;
      --worker=*) workers=${argument#--worker=} ;;
    esac; done
    port=$(python3 -c 'import socket; s = socket.socket()
s.bind(("localhost", 0)); print(s.getsockname()[1])')
    for worker in $workers; do
      run_on "$worker" "$port" "$command" || exit
    done ;;
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
          'XLA_FLAGS': '--xla_force_host_platform_device_count=1'},
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
