"""Forks, schedules and stop strings in whole runs of the program."""

import json

import pytest

from tepo_jax.rollout import dump
from tests import runs

pytestmark = pytest.mark.long

# Each of two tokens; an untrained model draws every pair.
STOPS = tuple(a + b for a in '13579' for b in '02468')
FIELDS = (
    '--config=configs/tiny.py:tepo', *runs.UNTRAINED, *(
        field for field in runs.SMALL if '.eval.' not in field
        and '.steps=' not in field), '--config.eval.period=0',
    '--config.checkpoint.keep=9', '--config.rollout.chunk=5',
    '--config.optimizer.warmup_steps=1', '--config.optimizer.schedule=cosine',
    '--config.optimizer.schedule_steps=6', '--config.optimizer.floor=0.1',
    f'--config.rollout.stop={STOPS}')


@pytest.fixture(name='train', scope='module')
def _train(programs):
  def train(workdir, steps, *arguments, status=0):
    done = programs.run('train', *FIELDS, f'--workdir={workdir}',
                        f'--config.steps={steps}', *arguments)
    assert done.returncode == status, done.stderr[-3000:]
    return done

  return train


@pytest.fixture(name='parent', scope='module')
def _parent(train, tmp_path_factory):
  """A run of four steps, with the embedded model that it made."""
  workdir = tmp_path_factory.mktemp('runs') / 'parent'
  train(workdir, 4)
  return workdir


def _digests(workdir, step):
  return json.loads((workdir / f'checkpoints/{step}/extra/metadata').read_text()
                    )['digests']


def _records(workdir):
  return {record['step']: runs.untimed(record)
          for record in runs.records(workdir)}


def test_a_resumed_run_follows_the_same_schedule_and_stops_alike(
    train, parent, tmp_path):
  """First of two steps, then of four: as the parent's four, to the bit."""
  workdir = tmp_path / 'run'
  train(workdir, 2)
  train(workdir, 4)
  assert _records(workdir) == _records(parent)
  assert _digests(workdir, 4) == _digests(parent, 4)
  rates = [record['optimizer/learning_rate']
           for record in _records(parent).values()]
  assert rates[0] == rates[1] / 2 and rates[1] > rates[2] > rates[3] > 3e-6
  _check_stops(record for step in range(1, 5)
               for record in dump.read(parent / 'rollouts', step))


def _check_stops(records):
  """Completions end with the first of STOPS, which is no truncation."""
  records = list(records)
  ended = [record for record in records
           if record['completion'].endswith(STOPS)]
  assert len(ended) > 5
  assert not any(record['truncated'] for record in ended)
  assert not any(stop in record['completion'][:-1] for record in ended
                 for stop in STOPS)


def test_an_evaluation_stops_alike(programs, parent, tmp_path):
  programs.run(
      'evaluate', *FIELDS, f'--checkpoint={parent}', f'--out={tmp_path}/out',
      '--config.eval.period=1', '--config.eval.limit=16',
      '--config.eval.samples=4', '--config.eval.max_tokens=16', status=0)
  _check_stops(map(json.loads, (
      tmp_path / 'out/samples.jsonl').read_text().splitlines()))


def test_a_fork_with_nothing_changed_is_its_parent_to_the_bit(
    train, parent, tmp_path):
  workdir = tmp_path / 'fork'
  done = train(workdir, 4, f'--from={parent}@2')
  assert f'continuing {parent} after step 2' in done.stdout
  assert 'warning' not in done.stderr
  theirs = _records(parent)
  assert _records(workdir) == {step: theirs[step] for step in (3, 4)}
  assert _digests(workdir, 4) == _digests(parent, 4)
  assert _digests(workdir, 2) == _digests(parent, 2)
  assert (workdir / 'base_model/model.safetensors').read_bytes() == (
      parent / 'base_model/model.safetensors').read_bytes()
  named = json.loads((workdir / 'parent.json').read_text())
  assert (named['run'], named['step']) == (str(parent), 2)
  # It goes on as any run; the flag names nothing else then.
  train(workdir, 5)
  assert sorted(_records(workdir)) == [3, 4, 5]
  for other in f'{parent}@3', f'{tmp_path}/other':
    said = train(workdir, 5, f'--from={other}', status=2).stderr
    assert f'is a run that began from {parent}@2' in said
  said = train(parent, 5, f'--from={workdir}', status=2).stderr
  assert 'is a run that began without --from' in said


def test_a_fork_has_its_own_fields_and_moments(train, parent, tmp_path):
  """Step 4 again, from the parent's weights after step 3: with the same
  samples, a rate of its own, a reference policy and moments of zero."""
  workdir = tmp_path / 'fork'
  train(workdir, 4, f'--from={parent}@3', '--new_optimizer',
        '--config.optimizer.learning_rate=1e-3',
        '--config.method.reference.coef=0.01')
  mine, theirs = _records(workdir)[4], _records(parent)[4]
  for name in 'reward', 'response_length_mean', 'sampling/tokens':
    assert mine[name] == theirs[name]
  rate = 'optimizer/learning_rate'
  assert mine[rate] == pytest.approx(1e-3 / 3e-5 * theirs[rate])
  begun, left = _digests(workdir, 3), _digests(parent, 3)
  assert {name.partition('/')[0] for name in begun.keys() ^ left.keys()} == {
      'reference'}
  for name in left:
    if name.startswith('params/'):
      assert begun[name] == left[name]
    elif {'mu', 'nu'} & set(name.split('/')):
      assert begun[name] == 0 != left[name]
  assert _digests(workdir, 4) != _digests(parent, 4)


@pytest.mark.parametrize('flags, said', [
    (['--from={parent}@7'], 'has no such checkpoint (it has: [1, 2, 3, 4])'),
    (['--from={parent}'], 'step 4 is done, so that config.steps=4 leaves'),
    (['--from=/nowhere'], '/nowhere is not the workdir of a run'),
    (['--from={parent}@2', '--config.pretrain.d_model=48'],
     'in config.pretrain.d_model they differ'),
    (['--from={parent}@2', '--config.lora.rank=2'], 'in config.lora.rank they'),
    (['--new_optimizer'], '--new_optimizer needs --from')])
def test_what_cannot_be_a_fork_is_refused(
    train, parent, tmp_path, flags, said):
  workdir = tmp_path / 'fork'
  error = train(workdir, 4, *(flag.format(parent=parent) for flag in flags),
                status=2).stderr
  assert said in error.splitlines()[-1]
  assert not workdir.exists()
