"""Tests the paper's claims: each method against a baseline, paired by seed.

Runs with the same seed are compared over the steps that both have, so that
effects of the seed cancel. A claim is "supported" or "contradicted" if Holm's
correction over the claims of its method leaves the paired t-test significant;
of the final accuracy "equal within ±b" if two one-sided tests exclude a mean
difference of b = POINTS or more; else "not resolved at ±x", where x is half the
uncorrected interval.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import numpy as np

from tepo_jax import errors
from tepo_jax.job import statistics
from tepo_jax.tools.report import figures
from tepo_jax.tools.report import runs as runs_lib
from tepo_jax.tools.report import significance

BASELINE = 'grpo'
TARGET = 0.95  # of the baseline's final accuracy, for "steps to accuracy"
FINAL = 0.2  # last part of the steps, whose mean is the final accuracy
FEWEST = 3  # seeds for a verdict
EFFECTS = (0.5, 1, 2)  # points of accuracy, whose cost in seeds is stated
POINTS = 2.0  # of accuracy, the smallest difference of interest


@dataclasses.dataclass(frozen=True)
class Measure:
  """A number of a run that the paper makes a claim about.

  value: metric by step, not empty -> number or None. sign: +1 if the paper
  claims higher values for TEPO, −1 for lower. scale, unit: for display.
  bound: the smallest difference of interest, in `unit`; None: not stated.
  """
  title: str
  claim: str
  metric: str | Callable
  value: Callable[[Sequence[float]], float | None]
  sign: int
  scale: float = 1.0
  unit: str = ''
  bound: float | None = None

  @property
  def heading(self) -> str:
    """The title with the unit."""
    return f'{self.title}, {self.unit}' if self.unit else self.title


def final(values: Sequence[float]) -> float:
  """Returns the mean over the last FINAL of the steps."""
  return float(np.mean(values[-max(1, round(FINAL * len(values))):]))


def initial(values: Sequence[float]) -> float:
  """Returns the mean over the first FINAL of the steps."""
  return final(values[::-1])


def unsteadiness(values: Sequence[float]) -> float | None:
  """Returns the mean |change| from one step to the next."""
  return float(np.mean(np.abs(np.diff(values)))) if len(values) > 1 else None


MEASURES = (
    Measure('Final accuracy', 'higher (Table 1)', 'accuracy', final, +1, 100,
            '%', POINTS),
    Measure('Reward, mean over the run', 'higher (Figure 3a)', 'reward',
            np.mean, +1, 100, '%'),
    Measure('Entropy, mean |change| a step', 'steadier (3.3.2)', 'entropy',
            unsteadiness, -1, 1, 'nats'),
    Measure('Clip ratio, mean', 'lower (Figure 2a)', figures.clip_ratio,
            np.mean, -1, 100, '%'),
    Measure('Gradient norm, mean', 'higher (Figure 3b)', 'grad_norm', np.mean,
            +1),
    Measure('Time of a step, median', 'less (Figure 2b)', 'seconds/step',
            np.median, -1, 1, 's'),
    Measure('Response length, mean', 'shorter (Figure 2b)',
            'response_length_mean', np.mean, -1, 1, 'tokens'),
)


@dataclasses.dataclass(frozen=True)
class Contrast:
  """One measure of one method compared with the baseline.

  own, base, difference: (mean, low, high) over the pairs of runs. pairs: each
  pair's difference.
  """
  label: str
  measure: Measure
  own: tuple[float, float, float]
  base: tuple[float, float, float]
  difference: tuple[float, float, float]
  pairs: tuple[float, ...]
  note: str = ''
  verdict: str = 'too few seeds'


def baseline(groups: Sequence[runs_lib.Seeds]) -> runs_lib.Seeds | None:
  """Returns the group to compare with, or None if there is only one."""
  if len(groups) < 2:
    return None
  return next((g for g in groups if g.label == BASELINE), groups[0])


def contrasts(groups: Sequence[runs_lib.Seeds]) -> list[Contrast]:
  """Compares every method with the baseline, by measure."""
  base = baseline(groups)
  if base is None:
    return []
  goal, found = _target(base), []
  for group in groups:
    if group is base:
      continue
    compared = [contrast(group, base, measure) for measure in MEASURES]
    if goal is not None:
      compared.append(_steps_contrast(group, base, goal))
    found += judged([one for one in compared if one])
  return found


def judged(found: Sequence[Contrast]) -> list[Contrast]:
  """Adds the verdicts, corrected over these claims."""
  tested = [c for c in found if len(c.pairs) >= FEWEST]
  adjusted = significance.holm([significance.paired_p(c.pairs) for c in tested])
  verdicts = {c.measure: _verdict(c, p) for c, p in zip(tested, adjusted)}
  return [dataclasses.replace(c, verdict=verdicts.get(c.measure, c.verdict))
          for c in found]


def _verdict(contrast, p):
  """p: of the paired t-test, corrected."""
  mean, _, high = contrast.difference
  error = 1 - statistics.LEVEL
  if p >= error:
    bound = contrast.measure.bound
    if bound and significance.equivalence_p(contrast.pairs, bound) < error:
      return f'equal within ±{bound:g}'
    return f'not resolved at ±{high - mean:.2g}'
  return 'supported' if contrast.measure.sign * mean > 0 else 'contradicted'


def power(found: Sequence[Contrast]) -> dict[str, tuple[float, list[int]]]:
  """Returns, by method, from the spread of its paired differences in the final
  accuracy: the points that this many seeds find, and the seeds that each of
  EFFECTS needs."""
  spreads = {c.label: (np.std(c.pairs, ddof=1), len(c.pairs)) for c in found
             if c.measure == MEASURES[0] and len(c.pairs) >= FEWEST}
  return {label: (significance.detectable(spread, pairs), [
      significance.seeds_needed(spread, effect) for effect in EFFECTS])
          for label, (spread, pairs) in spreads.items()}


def contrast(group: Any, base: Any, measure: Measure) -> Contrast | None:
  """Compares a measure of two methods, without a verdict.

  Each pair of runs with the same seed counts with the steps that both have;
  None: no pair has any.

  Args:
    group, base: as `runs.Seeds`; of each of their runs, `seed` and `series` are
      read.
  """
  pairs = []
  for both in _pairs(group, base):
    series = [run.series(measure.metric) for run in both]
    steps = [step for step in series[0] if step in series[1]]
    if steps:
      pairs.append([measure.value([x[step] for step in steps])
                    for x in series])
  pairs = [[measure.scale * x for x in pair] for pair in pairs
           if None not in pair]
  return _compared(group.label, measure, pairs)


def _compared(label, measure, pairs, note=''):
  if not pairs:
    return None
  differences = tuple(x - y for x, y in pairs)
  own, base = map(significance.over_seeds, zip(*pairs))
  return Contrast(label, measure, own, base,
                  significance.over_seeds(differences), differences, note)


def _pairs(group, base):
  by_seed = {run.seed: run for run in base.runs if run.seed is not None}
  return [(run, by_seed[run.seed]) for run in group.runs
          if run.seed in by_seed]


def _target(base):
  """Returns TARGET times the baseline's final accuracy, mean over seeds."""
  finals = [final(list(series.values())) for run in base.runs
            if (series := run.series('accuracy'))]
  return TARGET * float(np.mean(finals)) if finals else None


def _steps_contrast(group, base, goal):
  """Compares the first steps whose samples have an accuracy of `goal`."""
  pairs, late = [], 0
  for pair in _pairs(group, base):
    if not all(run.series('accuracy') for run in pair):
      continue  # nothing says when it reached the goal
    limit = 1 + min(run.records[-1]['step'] for run in pair)
    reached = [min([limit, *(
        step for step, value in run.series('accuracy').items()
        if value >= goal)]) for run in pair]
    late += reached.count(limit)
    pairs.append(reached)
  note = (f'not reached by {errors.counted(late, "run")}: counted as one step '
          'more than the steps made' if late else '')
  return _compared(group.label, Measure(
      f'Steps to {100 * goal:.1f} % accuracy', 'fewer (72 against 132)',
      'accuracy', None, -1, 1, 'steps'), pairs, note)
