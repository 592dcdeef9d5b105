"""The paper's claims on a map of runs: methods against each other, by seed.

Each method is compared with GRPO, which shows what its weight does, with TEPO
without its KL, which shows what the mask does, and with GSPO, which shows what
the token mean does, at the same number of updates per rollout step. What a
verdict means is said in `claims`; the accuracy after training, the primary
measure, is not corrected.

A method's seeds that were trained at several learning rates, of which some have
fewer than `claims.FEWEST` seeds, have chosen one: they compare nothing.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import pathlib

import numpy as np

from tepo_jax.job import results
from tepo_jax.job import statistics
from tepo_jax.tools.report import claims
from tepo_jax.tools.report import drawing
from tepo_jax.tools.report import overview
from tepo_jax.tools.report import regimes
from tepo_jax.tools.report import tables

BASELINES = claims.BASELINE, 'tepo_no_kl', 'gspo'


def _last(values):
  return values[-1]


_KEPT = {metric: name for name, metric in regimes.KEPT.items()}
# Those of `claims` that a map has, and what a map has besides.
_MEASURES = (
    claims.Measure('Accuracy after training', 'higher (Table 1)', 'evaluation',
                   _last, +1, 100, '%', claims.POINTS),
    claims.Measure('Accuracy of samples, mean over the run',
                   'higher (Figure 3a)', 'accuracy', np.mean, +1, 100, '%',
                   claims.POINTS),
    claims.Measure('Entropy, last fifth of the steps', 'not in the paper: more',
                   'entropy', claims.final, +1, 1, 'nats'),
    claims.Measure('KL to the starting model, at the end',
                   'not in the paper: less', 'start_kl', _last, -1, 1, 'nats'),
    *(dataclasses.replace(measure, metric=_KEPT[measure.metric])
      for measure in claims.MEASURES
      if measure.metric in _KEPT and measure.metric != 'accuracy'),
)


@dataclasses.dataclass(frozen=True)
class _Group:
  """Runs of a method at one learning rate and number of updates."""
  label: str
  learning_rate: float
  updates: int
  runs: list[regimes.Entry]


def markdown(entries: Sequence[regimes.Entry]) -> str:
  """Returns a table of verdicts for each number of updates and each baseline,
  or '' if no two methods have `claims.FEWEST` common seeds."""
  tables_of = {}
  for group, base, found in _compared(entries):
    tables_of.setdefault((group.updates, base.label), []).append(
        _row(group, base, found))
  return '\n\n'.join(
      f'## Against {label}, {updates} updates a rollout step\n\n'
      + tables.markdown_of(_HEAD, rows)
      for (updates, label), rows in tables_of.items())


def draw(entries: Sequence[regimes.Entry], out: pathlib.Path) -> None:
  """Writes differences_N.png and .svg for each number N of updates that has
  verdicts: a panel for each measure, a line for every two methods."""
  for updates, panels in intervals(entries).items():
    drawing.draw_intervals(
        panels, f'Differences between methods, {updates} updates a rollout '
        'step', "After a measure: the paper's claim. Mean, "
        f'{statistics.LEVEL:.0%} interval, uncorrected, and every seed. '
        'Orange: significant, the first measure by itself, the others with '
        "Holm's correction.",
        out / f'differences_{updates}')


def intervals(entries: Sequence[regimes.Entry]
              ) -> dict[int, dict[str, list[drawing.Interval]]]:
  """Returns, by number of updates and measure, the differences of `markdown`;
  of two baselines only that to the first."""
  compared = list(_compared(entries))
  one_rate = len({each.learning_rate for groups in compared
                  for each in groups[:2]}) == 1
  found = {}
  for group, base, contrast in compared:
    if group.label in BASELINES[:BASELINES.index(base.label)]:
      continue
    names = (each.label if one_rate else f'{each.label} {each.learning_rate:g}'
             for each in (group, base))
    found.setdefault(group.updates, {}).setdefault(
        f'{contrast.measure.heading}: {contrast.measure.claim}', []).append(
            drawing.Interval(
                ' − '.join(names), contrast.difference, contrast.pairs,
                contrast.verdict in ('supported', 'contradicted')))
  return found


def _compared(entries):
  """(method, baseline, contrast) for each number of updates, each of BASELINES
  and each measure with `claims.FEWEST` common seeds."""
  groups = _groups(entries)
  measures = [*_MEASURES, *(
      claims.Measure(name, 'not in the paper: fewer', name, _last, -1, 1,
                     'nats') for name in _texts(entries))]
  pairs = sorted(
      ((group, base) for base in groups for group in groups
       if base.updates == group.updates and base.label in BASELINES
       and base.label != group.label),
      key=lambda pair: (pair[1].updates, BASELINES.index(pair[1].label)))
  return ((group, base, found) for group, base in pairs
          for found in _contrasts(group, base, measures)
          if len(found.pairs) >= claims.FEWEST)


def _contrasts(group, base, measures):
  """With verdicts: the accuracy after training by itself; the others corrected
  over them."""
  first, *others = (claims.contrast(group, base, m) for m in measures)
  return [*claims.judged([c for c in [first] if c]),
          *claims.judged([c for c in others if c])]


_HEAD = ('method', 'rate', 'measure', 'result', 'paired difference', 'value',
         "other's value", 'its rate', 'seeds', 'claim of the paper')


def _row(group, base, found):
  return [group.label, f'{group.learning_rate:g}', found.measure.heading,
          found.verdict,
          *map(overview.with_interval, (found.difference, found.own,
                                        found.base)),
          f'{base.learning_rate:g}', str(len(found.pairs)), found.measure.claim]


def _groups(entries):
  """The runs to compare: without the seeds that chose a learning rate.

  A method's cell of fewer than `claims.FEWEST` runs is a rate that was not
  pursued if another rate was.
  """
  label, cells = regimes.labels(entries), {}
  for entry in entries:
    key = label[entry.name], entry.learning_rate, entry.updates
    cells.setdefault(key, []).append(entry)
  found = []
  for (name, rate, updates), members in sorted(cells.items()):
    choosers = {entry.seed for (other, _, count), some in cells.items()
                if (other, count) == (name, updates)
                and len(some) < claims.FEWEST for entry in some}
    kept = [entry for entry in members if entry.seed not in choosers]
    if len(kept) >= claims.FEWEST:
      found.append(_Group(name, rate, updates, kept))
  return found


def _texts(entries: Iterable[regimes.Entry]):
  """Names of the metrics that are nats per token of a text."""
  return sorted({name for entry in entries for name in entry.metrics
                 if name.endswith(f'/{results.NATS}')})
