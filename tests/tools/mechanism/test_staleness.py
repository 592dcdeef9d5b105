"""The comparison of methods: its numbers, its resuming, and torch's."""

import json
import pathlib
import re
import subprocess
import sys

import markdown_it  # rich needs it
import ml_collections
import numpy as np
import pytest

from configs import methods
from tepo_jax import errors
from tepo_jax.data import problem as problem_lib
from tepo_jax.learning import objective
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.tools.mechanism import comparison
from tepo_jax.tools.mechanism import contrasts
from tepo_jax.tools.mechanism import directions
from tepo_jax.tools.mechanism import observe
from tepo_jax.tools.mechanism import results_file
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
  found = contrasts.compare(x, target, 1.0)
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


def test_gradients_are_scaled_down_as_the_optimiser_does():
  """One minibatch's long gradient drowns the others' until it is scaled down;
  shorter ones stay as they are."""
  x, target = vectors(40, noise=0.5)
  length_J = np.linalg.norm(x['gpg'], axis=1)
  longest = length_J.max()
  x['grpo'] = x['gpg'].copy()
  x['grpo'][3] *= -1000
  found = contrasts.compare(x, target, longest)
  assert found['gpg']['clipped'] == found['gpg']['signal_to_noise']
  assert found['gpg']['norm'] == np.median(length_J)
  long = found['grpo']
  assert long['signal_to_noise'][0] < 0.01 * found['gpg']['clipped'][0]
  scaled = x['gpg'].copy()
  scaled[3] *= -longest / length_J[3]
  expected = contrasts.compare(x | {'gpg': scaled}, target, np.inf)['gpg']
  assert long['clipped'] == pytest.approx(expected['signal_to_noise'])
  assert found['gpg']['clipped_less_grpo'][0] == pytest.approx(
      found['gpg']['clipped'][0] - long['clipped'][0])
  assert long['clipped_less_grpo'] == [0, 0, 0]


def test_two_minibatches_have_no_intervals_from_pairs():
  """Some resample has one of them alone."""
  x, target = vectors(2)
  row = contrasts.compare(x, target, 1.0)['gspo']
  assert row['signal_to_noise'] is row['cosine'] is row['length'] is None
  assert row['to_grpo'] is not None and -1 <= row['halves'] <= 1
  assert contrasts.shares(x)['advantage']['A > 0']['share'] is None


def test_halves_without_a_gradient_have_no_cosine():
  gram_JJ = np.zeros((4, 4))
  assert contrasts.halves(gram_JJ) is None
  gram_JJ[0, 0] = 1  # of one minibatch alone
  assert contrasts.halves(gram_JJ) is None
  assert contrasts.halves(np.ones((1, 1))) is None
  assert contrasts.halves(np.ones((4, 4))) == pytest.approx(1)


def test_length_is_relative_to_the_policy_gradient_s():
  x, target = vectors(200)
  found = contrasts.compare(x, 2 * target, 1.0)['cispo']
  value, low, high = found['length']
  assert value == pytest.approx(0.5, abs=0.02) and low < value < high


def tokens_of_two_groups():
  """Two completions of four tokens for each of two problems; only M's KL is
  to be seen: A > 0 in completions 1 and 2, where the entropy falls."""
  mask_BT = np.arange(4) < np.array([4, 3, 4, 2])[:, None]
  fall_BT = np.array([[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1.]])
  kl_BT = np.array([[9, 9, 9, 9], [3, 8, 1, 9], [7, 4, 2, 6], [9, 9, 9, 9.]])
  x = objective.Tokens(
      logp_BT=np.full((4, 4), -1.5), old_logp_BT=np.full((4, 4), -1.0),
      entropy_BT=1 - fall_BT / 4, old_entropy_BT=np.ones((4, 4)),
      advantage_BT=np.array([-1, 2, 1, 0.])[:, None] * mask_BT,
      mask_BT=mask_BT, kl_BT=kl_BT)
  groups = [groups_lib.Group(
      groups_lib.Prompt(problem_lib.Problem(
          str(n), f'problem {n}', ('1',), 'test'), (1,), n),
      token_GT=10 * np.array([[2 * n + 1], [2 * n + 2]]) + np.arange(4),
      logp_GT=np.zeros((2, 4)), length_G=mask_BT[2 * n:2 * n + 2].sum(1),
      ended_G=np.ones(2, bool), text_G=('', ''), accuracy_G=np.zeros(2))
            for n in range(2)]
  return x, groups


def test_spread_counts_tokens_mask_and_kl_by_class():
  x, _ = tokens_of_two_groups()  # of 13; M: KL 3, 1 and 4, 2
  by_class = directions.classes(x, np.array([0.5, 0.9, 1.1]))
  found = contrasts.spread(x, by_class)
  assert found['advantage'] == {
      'A > 0': pytest.approx([7 / 13, 1, 1]),
      'A < 0': pytest.approx([4 / 13, 0, 0])}
  assert found['position'] == {  # of three tokens: quarters 1, 2 and 3
      'quarter 1': pytest.approx([4 / 13, 1 / 4, 3 / 10]),
      'quarter 2': pytest.approx([3 / 13, 1 / 4, 4 / 10]),
      'quarter 3': pytest.approx([4 / 13, 2 / 4, 3 / 10]),
      'quarter 4': pytest.approx([2 / 13, 0, 0])}
  assert found['entropy']['quartile 3'] == pytest.approx([1, 1, 1])


def test_the_tokens_of_the_kl_come_with_their_completions():
  x, groups = tokens_of_two_groups()
  found = contrasts.tokens_of_kl(x, groups, lambda ids: str([*map(int, ids)]))
  assert [(row['problem'], row['before'], row['token'], row['after'], row['kl'],
           row['advantage']) for row in found] == [
               ('problem 1', '[30]', '[31]', '[32, 33]', 4, 1),
               ('problem 0', '[]', '[20]', '[21, 22]', 3, 2),
               ('problem 1', '[30, 31]', '[32]', '[33]', 2, 1),
               ('problem 0', '[20, 21]', '[22]', '[]', 1, 2)]
  assert {(row['entropy'], row['entropy_change'], row['log_ratio'])
          for row in found} == {(1, -0.25, -0.5)}


@pytest.mark.parametrize('text', [
    ' 39', 'a | b', '*x* _y_ ~~z~~ `c`', '[39](http)', '<b>&amp;</b>', '$x$',
    'a\nb "c" \\ é', '# 1'])
def test_a_cell_shows_a_text_as_it_is(text):
  """By another reader of Markdown; the table's own escape goes first."""
  cell = comparison._text(text)
  assert not re.search(r'(?<!\\)\|', cell)
  [inline] = markdown_it.MarkdownIt().parseInline(cell)
  assert {each.type for each in inline.children} <= {'text', 'text_special'}
  shown = ''.join(each.content for each in inline.children)
  assert json.loads(shown) == text


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
  mixture = lab.training
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
    results = results_file.start(
        out, lock, results_file.setup(lab, minibatches))
    staleness.run(lab, results, minibatches, out)
  return out


@pytest.mark.long
def test_a_whole_measurement(lab, out):
  saved = json.loads((out / results_file.NAME).read_text())
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
  assert 'β = 0.001' in text and saved['setup']['beta'] == 1e-3
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
  path = out / results_file.NAME
  kept = path.read_text()
  for factor in (1.03, float('nan')):
    saved = json.loads(kept)
    saved['levels']['2']['first_update']['tepo_kl']['norm'] *= factor
    path.write_text(json.dumps(saved))
    assert subprocess.run(command, capture_output=True).returncode == 1
  path.write_text(kept)


@pytest.mark.long
def test_the_config_s_method_only_makes_the_updates(
    lab, out, tmp_path, monkeypatch):
  """At the model itself, another config, whose estimator does not divide by the
  std of rewards, has the same vectors and shows the same advantages."""
  config = lab.config.copy_and_resolve_references()
  config.method = ml_collections.ConfigDict(methods.methods(1.0)['gpg'])
  other = observe.Lab(config, lab.session, 8)
  assert other.learner.programs.policy_loss.method.estimator == 'gpg'
  advantages = []

  def compared(x, *_):
    advantages.append(x.advantage_BT)
    return []

  monkeypatch.setattr(contrasts, 'tokens_of_kl', compared)
  monkeypatch.setattr(staleness, 'COUNTS', (0, 1))
  _measure(other, tmp_path / 'out')
  advantage_BT, _ = advantages
  batch = lab.batch(lab.select(lab.start, 4, 8, 'off').groups, 'grpo')
  np.testing.assert_array_equal(advantage_BT, np.where(
      batch.mask_BT, batch.advantage_B[:, None], 0))
  for name in ('sketches_0', 'sketches_0_fresh'):
    want, have = (directions.combined([
        directions.Vectors(**np.load(folder / name / f'000{j}.npz'))
        for j in range(2)]) for folder in (out, tmp_path / 'out'))
    assert np.abs(want).max() > 0
    np.testing.assert_allclose(have, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.long
def test_a_measurement_resumes(lab, out, monkeypatch, capsys):
  """With one level and one minibatch of it gone, it computes that alone."""
  path = out / results_file.NAME
  kept = path.read_text()
  saved = json.loads(kept)
  wanted, saved['levels']['0'] = saved['levels'].pop('2'), 'kept'
  results_file.write(saved, out)
  (out / 'sketches_2' / '0001.npz').unlink()
  calls = []
  plain = directions.PullBack.__call__

  def counted(self, *arguments):
    calls.append(1)
    return plain(self, *arguments)

  monkeypatch.setattr(directions.PullBack, '__call__', counted)
  capsys.readouterr()
  _measure(lab, out)
  shown = capsys.readouterr().err.splitlines()
  assert shown[0] == 'step 1/12  sampling the rollout of the updates ...'
  assert [line.split()[1] for line in shown if 'eta' in line] == ['10/12']
  resumed = json.loads(path.read_text())
  assert len(calls) == 1 and resumed['levels']['0'] == 'kept'
  for name, row in resumed['levels']['2']['methods'].items():
    for key in ('to_grpo', 'length_to_grpo'):
      assert row[key] == pytest.approx(wanted['methods'][name][key], rel=1e-4)
  with (lock_lib.FolderLock(out) as lock,
        pytest.raises(errors.InputError, match='measurement: seed differ')):
    results_file.start(out, lock, saved['setup'] | dict(seed=7))
  path.write_text(kept)


def test_a_setup_of_many_digits_is_found_again(tmp_path):
  setup = {'config': {'optimizer.learning_rate': 3.1622777e-06}}
  with lock_lib.FolderLock(tmp_path) as lock:
    new = results_file.start(tmp_path, lock, setup)
    results_file.write(dict(new, levels={'0': 1.23456789}), tmp_path)
    again = results_file.start(tmp_path, lock, setup)
  assert again == dict(setup=setup, levels={'0': 1.23457})


@pytest.mark.long
def test_a_complete_measurement_computes_nothing(lab, out, monkeypatch):
  monkeypatch.delattr(observe.Lab, 'select')
  kept = (out / results_file.NAME).read_text()
  _measure(lab, out)
  assert (out / results_file.NAME).read_text() == kept
