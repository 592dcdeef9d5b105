"""Two data sets, 3 to 1, in a run that is killed and resumed.

It prints its number and a published one.
"""

import json
import signal
import subprocess
import time

import pytest

from tepo_jax.data import embedded
from tests import runs
from tests.faults import kill

pytestmark = [pytest.mark.long, pytest.mark.nightly]


def _arguments(folder, workdir):
  first, second = (folder / f'{name}.jsonl' for name in ('many', 'few'))
  return (*runs.train_arguments(folder / 'model', folder / workdir),
          f"--config.data.sets=(('{first}',3),('{second}',1))",
          '--config.rollout.prompts=8', '--config.published.after=0.5',
          '--config.published.metric=eval/arithmetic/avg@2')


def _write_sets(folder):
  """The second is smaller than its share of the run, so it begins anew."""
  for name, start, stop in (('many', 0, 40), ('few', 40, 43)):
    (folder / f'{name}.jsonl').write_text(''.join(
        json.dumps({'problem': p.problem, 'answer': p.answers[0]}) + '\n'
        for p in embedded.problems('arithmetic', 'train', 43)[start:stop]))


def test_killed_and_resumed_with_exact_quotas(tmp_path):
  runs.make_model(tmp_path / 'model')
  _write_sets(tmp_path)
  runs.run('train', *_arguments(tmp_path, 'alone'))
  killed = tmp_path / 'killed'
  process = subprocess.Popen(
      runs.command('train', *_arguments(tmp_path, 'killed')), cwd=runs.ROOT,
      env=runs.environment(), stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL)
  metrics = killed / 'metrics.jsonl'
  while process.poll() is None and not (
      metrics.exists() and len(runs.records(killed)) > 3):
    time.sleep(0.05)
  assert process.poll() is None, 'it ended before it could be killed'
  process.send_signal(signal.SIGKILL)
  process.wait()
  resumed = runs.run('train', *_arguments(tmp_path, 'killed')).stdout
  assert 'after step 8; published: 50.0% after training' in resumed
  steps = [record for record in runs.records(killed) if record['step']]
  assert len(steps) == 8
  assert [(record['data/many/groups_sampled'],
           record['data/few/groups_sampled']) for record in steps] == [
               (6, 2)] * 8
  prompts = [line['id'] for path in sorted((killed / 'rollouts').iterdir())
             for line in map(json.loads, path.read_text().splitlines())
             if line['set'].endswith('few.jsonl') and not line['sample']]
  assert len(prompts) == 16 and all(
      len(set(prompts[i:i + 3])) == 3 for i in range(0, 15, 3))
  assert kill.fingerprint(killed) == kill.fingerprint(tmp_path / 'alone')
