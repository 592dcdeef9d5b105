"""Verdicts on made-up maps, whose differences are known."""

from tepo_jax.tools.report import regimes
from tepo_jax.tools.report import verdicts

NATS = 'eval/prose/nats_per_token'


def entry(method, seed, rate=1e-4, updates=4, **metrics):
  """Made-up metrics of four steps; what is given replaces them."""
  steps = {name: dict(enumerate(values, 1)) for name, values in ({
      'evaluation': (0.1, 0.5), 'accuracy': (0.1, 0.2, 0.3, 0.4),
      'entropy': (0.5, 0.4, 0.3, 0.2), 'gradient': (1.0, 1.0, 1.0, 3.0),
      'clip': (0.0, 0.0, 0.0, 0.0), 'tokens': (6.0, 6.0, 6.0, 6.0),
      NATS: (4.7, 4.7)} | metrics).items()}
  return regimes.Entry(f'{method}@{rate}@{updates}@{seed}', method, {}, rate,
                       updates, seed, steps)


def rows(entries):
  """{(method, measure, rate, rate of grpo): cells} of the tables."""
  found = {}
  for line in verdicts.markdown(entries).splitlines():
    cells = [cell.strip() for cell in line.split('|')[1:-1]]
    if cells and cells[0] not in ('method', '---'):
      found[cells[0], cells[2], cells[1], cells[7]] = cells
  return found


def test_each_measure_is_compared_by_seed():
  """Differences of 1.0, 1.1 and 1.2 around effects of the seed."""
  entries = []
  for seed in range(3):
    more = 1 + 0.1 * seed
    entries += [
        entry('grpo', seed, clip=[0.02 + seed] * 4, tokens=[6.0 + seed] * 4),
        entry('tepo', seed, clip=[0.02 + seed - more / 100] * 4,
              tokens=[6.0 + seed + more] * 4, evaluation=(0.1, 0.5 + 0.1 * (
                  1 + seed)), entropy=(0.5, 0.4, 0.3, 0.2 + more),
              gradient=[2.0] * 4, **{NATS: (4.7, 4.7 - more)})]
  found = {key[1]: cells for key, cells in rows(entries).items()}
  # Means 1.1, std 0.1, t = 4.30265: half the interval is 0.2484.
  assert found['Clip ratio, mean, %'][3:5] == [
      'supported', '-1.10 [-1.35, -0.85]']
  assert found['Response length, mean, tokens'][3:5] == [
      'contradicted', '1.10 [0.85, 1.35]']
  assert found['Entropy, last fifth of the steps, nats'][4] == (
      '1.10 [0.85, 1.35]')
  assert found[f'{NATS}, nats'][3:5] == ['supported', '-1.10 [-1.35, -0.85]']
  assert found['Accuracy after training, %'][3] == 'not resolved at ±25'
  # Of 1, 1, 1 and 3 the standard deviation is 0.866, the mean 1.5.
  assert found['Gradient norm, spread over steps, % of its mean'][4:7] == [
      '-57.7 [-57.7, -57.7]', '0 [0, 0]', '57.7 [57.7, 57.7]']
  assert found['Accuracy of samples, mean over the run, %'][3] == (
      'equal within ±2')


def test_seeds_that_chose_a_rate_compare_no_methods():
  """Seeds 0 and 1 were trained at 3e-4 too, which nobody pursued."""
  entries = [entry(method, seed, evaluation=(0.1, 0.9 if seed < 2 else 0.5))
             for method in ('grpo', 'tepo') for seed in range(5)]
  entries += [entry('tepo', seed, 3e-4) for seed in (0, 1)]
  cells = rows(entries)['tepo', 'Accuracy after training, %', '0.0001',
                        '0.0001']
  assert cells[5] == '50.0 [50.0, 50.0]' and cells[8] == '3'


def test_methods_are_compared_at_each_rate_of_grpo_and_equal_updates():
  entries = [entry('grpo', seed, rate) for seed in range(3)
             for rate in (1e-4, 3e-4)]
  entries += [entry(method, seed, updates=updates) for seed in range(3)
              for method, updates in (('tepo', 4), ('gspo', 1))]
  assert {key[0::3] for key in rows(entries)} == {
      ('tepo', '0.0001'), ('tepo', '0.0003')}


def test_too_few_seeds_have_no_verdict():
  assert not verdicts.markdown([entry(method, seed) for seed in (0, 1)
                                for method in ('grpo', 'tepo')])


def test_a_metric_that_no_run_recorded_is_not_compared():
  entries = [entry(method, seed, clip=()) for seed in range(3)
             for method in ('grpo', 'gpg')]
  measures = {measure for _, measure, _, _ in rows(entries)}
  assert len(measures) == 6 and 'Clip ratio, mean, %' not in measures
