"""The comparison of methods: its numbers, its resuming, and torch's."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.tools.mechanism import comparison
from tepo_jax.tools.mechanism import contrasts
from tepo_jax.tools.mechanism import directions
from tepo_jax.tools.mechanism import progression
from tepo_jax.tools.mechanism import staleness

_TORCH = pathlib.Path(__file__).with_name('torch_gradients.py')


def vectors(minibatches=12, noise=1.0):
  """Random vectors of every slope, and an independent policy gradient."""
  rng = np.random.default_rng(0)
  signal = rng.normal(size=30)
  names = directions.names(directions.CLASSES)
  found = {name: signal + noise * rng.normal(size=(minibatches, 30))
           for name in names}
  for division, classes in directions.CLASSES.items():
    *others, last = classes
    found[division, last] = found[directions.WHOLE] - sum(
        found[division, name] for name in others)
  return found, signal + noise * rng.normal(size=(minibatches, 30))


def test_of_the_sample_is_numpy_s_on_repeated_minibatches():
  x, _ = vectors()
  weight_J = np.array([2, 0, 1, 3, 1, 0, 1, 1, 2, 1, 0, 0])
  index = np.repeat(np.arange(12), weight_J)
  a, b = (x[name][index].sum(0) for name in ('gspo', 'grpo'))
  found = contrasts.same_data(
      weight_J[None].astype(float), x['gspo'], x['grpo'])
  np.testing.assert_allclose(np.concatenate(found), [
      a @ b / np.linalg.norm(a) / np.linalg.norm(b),
      np.linalg.norm(a) / np.linalg.norm(b)])


def test_methods_against_the_policy_gradient():
  x, target = vectors(200)
  found = contrasts.compare(x, target)
  assert list(found) == ['tepo', *directions.METHODS]
  assert found['grpo']['to_grpo'] == pytest.approx([1, 1, 1])
  assert found['grpo']['length_to_grpo'] == pytest.approx([1, 1, 1])
  signal = np.random.default_rng(0).normal(size=30)
  for name, row in found.items():
    value, low, high = row['signal_to_noise']  # |signal|² / 30
    assert low < signal @ signal / 30 < high and low < value < high, name
    value, low, high = row['cosine']
    assert value == pytest.approx(1, abs=0.02) and low < value < high
  # Each half is of 100 minibatches: its mean has the noise 30 / 100.
  signal_share = signal @ signal / (signal @ signal + 30 / 100)
  assert found['gspo']['halves'] == pytest.approx(signal_share, abs=0.01)
  tepo = x['tepo_no_kl'] + directions.BETA * x['tepo_kl']
  assert found['tepo']['to_grpo'][0] == pytest.approx(contrasts.same_data(
      np.ones((1, 200)), tepo, x['grpo'])[0][0])


def test_two_minibatches_have_no_intervals_from_pairs():
  """Some resample has one of them alone."""
  x, target = vectors(2)
  row = contrasts.compare(x, target)['gspo']
  assert row['signal_to_noise'] is row['cosine'] is row['length'] is None
  assert row['to_grpo'] is not None and -1 <= row['halves'] <= 1
  assert contrasts.shares(x)['advantage']['A > 0']['share'] is None


def test_shares_add_up_and_are_those_of_pairs():
  x, _ = vectors()
  found = contrasts.shares(x)
  whole = x['tepo_no_kl']

  def direct(part):
    return sum(part[i] @ whole[j] for i in range(12) for j in range(12)
               if i != j)

  for division, by_class in found.items():
    assert list(by_class) == list(directions.CLASSES[division])
    assert sum(row['share'][0] for row in by_class.values()) == (
        pytest.approx(1))
    for name, row in by_class.items():
      assert row['share'][0] == pytest.approx(
          direct(x[division, name]) / direct(whole))
  assert contrasts.shares({'tepo_no_kl': whole}) == {}


def test_the_kl_s_part():
  x, _ = vectors(10, noise=0.1)
  x['tepo_kl'] = 0.25 * x['tepo_no_kl']
  found = contrasts.of_kl(x)
  for name, want in (('length', 0.25), ('cosine', 1), ('update_length', 0.25),
                     ('update_cosine', 1)):
    assert found[name] == pytest.approx(3 * [want])
  x['tepo_kl'] = 0 * x['tepo_kl']
  assert contrasts.of_kl(x)['cosine'] is None
  x['tepo_kl'][:5] = -x['tepo_no_kl'][:5]  # of half the minibatches
  found = contrasts.of_kl(x)
  assert found['update_cosine'] == pytest.approx(3 * [-1])
  assert found['update_length'][0] == pytest.approx(0.5)
  assert found['length'][0] == pytest.approx(0.5, rel=0.1)


def test_repeated_prompts_are_refused(lab):
  mixture = lab.session.training_prompts()
  assert len({mixture.prompt(n).problem.problem for n in range(24)}) == 24
  staleness.check_distinct(mixture, 24, 24)
  with pytest.raises(errors.InputError, match='need 25 .* after 24: lower '
                     '--minibatches, or raise data.limit=24$'):
    staleness.check_distinct(mixture, 25, 24)
  with pytest.raises(errors.InputError, match='lower --minibatches$'):
    staleness.check_distinct(mixture, 25, None)


@pytest.mark.long
def test_a_measurement_of_too_few_prompts_is_refused(lab, tmp_path):
  """Four groups for the updates, twelve measured, then as many fresh ones."""
  with pytest.raises(errors.InputError, match='need 28 .* after 24'):
    _measure(lab, tmp_path / 'out', 3)


@pytest.fixture(scope='module', name='out')
def _out(lab, tmp_path_factory):
  """A whole measurement of two minibatches, of four groups each."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(staleness, 'COUNTS', (0, 1, 2))
    patch.setattr(staleness, 'DIVIDED', (0,))
    yield _measure(lab, tmp_path_factory.mktemp('staleness') / 'out')


def _measure(lab, out, minibatches=2):
  with lock_lib.FolderLock(out) as lock:
    results = progression.start(
        out, lock, progression.setup(lab, minibatches))
    staleness.run(lab, results, minibatches, out)
  return out


@pytest.mark.long
def test_a_whole_measurement(lab, out):
  saved = json.loads((out / progression.RESULTS).read_text())
  assert list(saved['levels']) == ['0', '1', '2']
  start, _, last = saved['levels'].values()
  assert start['kl']['length'] == [0, 0, 0] and start['tokens'] == []
  assert start['methods']['cispo']['to_grpo'] == pytest.approx([1, 1, 1])
  assert start['methods']['tepo']['length_to_grpo'] == pytest.approx([1, 1, 1])
  assert last['methods']['gspo']['to_grpo'][0] < 0.999
  assert last['kl']['length'][0] > 0 and last['shares'] == {}
  assert len(last['tokens']) == 20
  kl = [row['kl'] for row in last['tokens']]
  assert kl == sorted(kl, reverse=True) and kl[-1] > 0
  assert all(row['entropy_change'] < 0 < row['advantage']
             for row in last['tokens'])
  assert last['sketch_error'] < 1e-5  # the model has fewer parameters
  # Parts: of two classes one pullback more, of four three.
  assert 2 * 8 < start['pullbacks'] <= (4 + 7 + 1) * 8
  text = comparison.markdown(saved)
  assert '| 2 | kl_cov | ' in text and '| 0 | entropy: quartile 4 | ' in text
  assert 'None' not in text and lab.config.model not in text


@pytest.mark.long
def test_torch_has_the_same_gradients(lab, out):
  """GRPO's, TEPO's and the KL's after two updates, by the script."""
  command = [sys.executable, _TORCH, f'--old={lab.config.model}',
             f'--out={out}', '--groups=4']
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  [difference] = [line.split()[-1] for line in done.stdout.splitlines()
                  if line.startswith('largest')]
  assert float(difference.rstrip('%')) < 0.1
  path = out / progression.RESULTS
  kept = path.read_text()
  saved = json.loads(kept)
  saved['levels']['2']['first_update']['tepo_kl']['norm'] *= 1.03
  path.write_text(json.dumps(saved))
  assert subprocess.run(command, capture_output=True).returncode == 1
  path.write_text(kept)


@pytest.mark.long
def test_a_measurement_resumes(lab, out, monkeypatch):
  """With one level and one minibatch of it gone, it computes that alone."""
  path = out / progression.RESULTS
  kept = path.read_text()
  saved = json.loads(kept)
  wanted, saved['levels']['0'] = saved['levels'].pop('2'), 'kept'
  progression.write(saved, out)
  (out / 'sketches_2' / '0001.npz').unlink()
  calls = []
  plain = directions.PullBack.__call__

  def counted(self, *arguments):
    calls.append(1)
    return plain(self, *arguments)

  monkeypatch.setattr(directions.PullBack, '__call__', counted)
  _measure(lab, out)
  resumed = json.loads(path.read_text())
  assert len(calls) == 1 and resumed['levels']['0'] == 'kept'
  for name, row in resumed['levels']['2']['methods'].items():
    for key in ('to_grpo', 'length_to_grpo'):
      assert row[key] == pytest.approx(wanted['methods'][name][key], rel=1e-4)
  path.write_text(kept)
