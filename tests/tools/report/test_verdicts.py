"""Verdicts on made-up maps, whose differences are known."""

import re

import numpy as np

from tepo_jax.tools.report import regimes
from tepo_jax.tools.report import verdicts

NATS = 'eval/prose/nats_per_token'


def entry(method, seed, rate=1e-4, updates=4, **metrics):
  """Made-up metrics of four steps; what is given replaces them."""
  steps = {name: dict(enumerate(values, 1)) for name, values in ({
      'evaluation': (0.1, 0.5), 'accuracy': (0.1, 0.2, 0.3, 0.4),
      'entropy': (0.5, 0.4, 0.3, 0.2), 'gradient': (1.0, 1.0, 1.0, 3.0),
      'clip': (0.0, 0.0, 0.0, 0.0), 'tokens': (6.0, 6.0, 6.0, 6.0),
      'start_kl': (0.01, 0.3), NATS: (4.7, 4.7)} | metrics).items()}
  return regimes.Entry(f'{method}@{rate}@{updates}@{seed}', method, {}, rate,
                       updates, seed, steps)


def _cells(line):
  return [cell.strip() for cell in re.split(r'(?<!\\)\|', line)[1:-1]]


def rows(entries, base='grpo', updates=4):
  """{(method, measure): cells} of one table."""
  [part] = [part for part in verdicts.markdown(entries).split('## ')
            if part.startswith(f'Against {base}, {updates} updates')] or ['']
  lines = list(map(_cells, part.strip().splitlines()[4:]))
  return {(cells[0], cells[2]): cells for cells in lines}


def test_each_measure_is_compared_by_seed():
  """Differences of 1.0, 1.1 and 1.2 around effects of the seed."""
  entries = []
  for seed in range(3):
    more = 1 + 0.1 * seed
    entries += [
        entry('grpo', seed, clip=[0.02 + seed] * 4, tokens=[6.0 + seed] * 4),
        entry('tepo', seed, clip=[0.02 + seed - more / 100] * 4,
              start_kl=(0.01, 0.3 + more),
              tokens=[6.0 + seed + more] * 4, evaluation=(0.1, 0.5 + 0.1 * (
                  1 + seed)), entropy=(0.5, 0.4, 0.3, 0.2 + more),
              gradient=[1.5 + more] * 4, **{NATS: (4.7, 4.7 - more)})]
  found = {measure: cells for (_, measure), cells in rows(entries).items()}
  # Means 1.1, std 0.1, t = 4.30265: half the interval is 0.2484.
  assert found['Clip ratio, mean, %'][3:5] == [
      'supported', '-1.10 [-1.35, -0.85]']
  assert found['Response length, mean, tokens'][3:5] == [
      'contradicted', '1.10 [0.85, 1.35]']
  assert found['Entropy, last fifth of the steps, nats'][4] == (
      '1.10 [0.85, 1.35]')
  assert found['Gradient norm, mean'][3:5] == [
      'supported', '1.10 [0.85, 1.35]']
  assert found[f'{NATS}, nats'][3:5] == ['supported', '-1.10 [-1.35, -0.85]']
  assert found['KL to the starting model, at the end, nats'][3:5] == [
      'contradicted', '1.10 [0.85, 1.35]']
  assert found['Accuracy after training, %'][3] == 'not resolved at ±25'
  assert found['Accuracy of samples, mean over the run, %'][3] == (
      'equal within ±2')
  # From 0.3 to 1.2, 1.3 and 1.4 instead of to 0.2: 0.8, 0.9 and 1 more, by 3.
  assert found[r'Entropy, mean \|change\| a step, nats'][4] == (
      '0.300 [0.217, 0.383]')


def test_accuracy_after_training_is_not_corrected():
  """Differences of 10, 11 and 13 points: t = 12.9, p = 0.006, but 0.05 and
  more if corrected over nine measures."""
  found = rows([entry(method, seed, evaluation=(0.1, 0.2 + gain))
                for method, gains in (('grpo', (0, 0, 0)),
                                      ('tepo', (0.10, 0.11, 0.13)))
                for seed, gain in enumerate(gains)])
  assert len(found) >= 9
  assert found['tepo', 'Accuracy after training, %'][3] == 'supported'


def test_methods_are_also_compared_with_tepo_without_its_kl_and_with_gspo():
  entries = [entry(method, seed, tokens=[tokens] * 4) for seed in range(3)
             for method, tokens in (
                 ('grpo', 6.0), ('tepo_no_kl', 7.0), ('tepo', 9.0),
                 ('gspo', 7.5))]
  measure = 'Response length, mean, tokens'
  found = rows(entries, 'tepo_no_kl')
  assert found['tepo', measure][4] == '2.00 [2.00, 2.00]'
  assert found['grpo', measure][4] == '-1.00 [-1.00, -1.00]'
  assert rows(entries)['tepo', measure][4] == '3.00 [3.00, 3.00]'
  assert rows(entries, 'gspo')['tepo_no_kl', measure][4] == (
      '-0.500 [-0.500, -0.500]')


def test_the_figure_has_each_two_methods_once():
  entries = [entry(method, seed, tokens=[tokens[seed]] * 4)
             for seed in range(3) for method, tokens in (
                 ('grpo', (6.0, 6.0, 6.0)), ('tepo_no_kl', (7.0, 7.0, 7.0)),
                 ('tepo', (9.0, 10.0, 11.0)))]
  found = verdicts.intervals(entries)
  assert list(found) == [4] and len(found[4]) == 9
  lines = found[4]['Response length, mean, tokens: shorter (Figure 2b)']
  assert [(line.label, line.value[0], line.bold) for line in lines] == [
      ('tepo − grpo', 4.0, False), ('tepo_no_kl − grpo', 1.0, True),
      ('tepo − tepo_no_kl', 3.0, False)]
  assert lines[0].points == (3.0, 4.0, 5.0)
  np.testing.assert_allclose(lines[0].value[1:], [1.516, 6.484], atol=1e-3)


def test_the_figure_names_rates_where_they_differ():
  entries = [entry(method, seed, rate) for seed in range(3)
             for method, rate in (
                 ('grpo', 1e-4), ('tepo', 1e-4), ('tepo', 3e-4))]
  [panels] = verdicts.intervals(entries).values()
  assert [line.label for line in next(iter(panels.values()))] == [
      'tepo 0.0001 − grpo 0.0001', 'tepo 0.0003 − grpo 0.0001']


def test_seeds_that_chose_a_rate_compare_no_methods():
  """Seeds 0 and 1 of tepo were trained at 3e-4 too, which nobody pursued."""
  entries = [entry(method, seed, evaluation=(0.1, 0.9 if seed < 2 else 0.5))
             for method in ('grpo', 'tepo') for seed in range(5)]
  entries += [entry('tepo', seed, 3e-4) for seed in (0, 1)]
  cells = rows(entries)['tepo', 'Accuracy after training, %']
  assert cells[5] == '50.0 [50.0, 50.0]' and cells[8] == '3'


def test_a_single_run_elsewhere_leaves_out_no_seed():
  entries = [entry(method, seed) for method in ('grpo', 'tepo')
             for seed in range(3)] + [entry('tepo', 2, updates=1)]
  assert rows(entries)['tepo', 'Accuracy after training, %'][8] == '3'


def test_methods_are_compared_at_each_rate_of_the_other_and_equal_updates():
  entries = [entry('grpo', seed, rate) for seed in range(3)
             for rate in (1e-4, 3e-4)]
  entries += [entry(method, seed, updates=updates) for seed in range(3)
              for method, updates in (('tepo', 4), ('gspo', 1))]
  lines = list(map(_cells, verdicts.markdown(entries).splitlines()[4:]))
  assert [(cells[0], cells[7]) for cells in lines] == (
      [('tepo', '0.0001')] * 9 + [('tepo', '0.0003')] * 9)


def test_too_few_seeds_have_no_verdict():
  assert not verdicts.markdown([entry(method, seed) for seed in (0, 1)
                                for method in ('grpo', 'tepo')])


def test_a_metric_that_no_run_recorded_is_not_compared():
  entries = [entry(method, seed, clip=()) for seed in range(3)
             for method in ('grpo', 'gpg')]
  measures = {measure for _, measure in rows(entries)}
  assert len(measures) == 8 and 'Clip ratio, mean, %' not in measures
