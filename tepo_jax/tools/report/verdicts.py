"""The paper's claims on a map of runs: each method against GRPO, by seed.

A map's first seeds choose each method's learning rate; the others, which chose
nothing, compare the methods with the same number of updates per rollout step.
What a verdict means is said in `claims`.
"""

from collections.abc import Iterable, Sequence
import dataclasses

import numpy as np

from tepo_jax.job import results
from tepo_jax.tools.report import claims
from tepo_jax.tools.report import overview
from tepo_jax.tools.report import regimes
from tepo_jax.tools.report import tables


def _spread(values):
  """Standard deviation over the steps as a share of the mean."""
  return float(np.std(values) / np.mean(values)) if np.any(values) else None


_MEASURES = (
    claims.Measure('Accuracy after training', 'higher (Table 1)', 'evaluation',
                   lambda values: values[-1], +1, 100, '%', claims.POINTS),
    claims.Measure('Accuracy of samples, mean over the run',
                   'higher (Figure 3a)', 'accuracy', np.mean, +1, 100, '%',
                   claims.POINTS),
    claims.Measure('Entropy, last fifth of the steps', 'kept (3.3.2)',
                   'entropy', claims.final, +1, 1, 'nats'),
    claims.Measure('Gradient norm, spread over steps', 'steadier (Figure 3)',
                   'gradient', _spread, -1, 100, '% of its mean'),
    claims.Measure('Clip ratio, mean', 'lower (Figure 2a)', 'clip', np.mean, -1,
                   100, '%'),
    claims.Measure('Response length, mean', 'shorter (Figure 2b)', 'tokens',
                   np.mean, -1, 1, 'tokens'),
)


@dataclasses.dataclass(frozen=True)
class _Group:
  """Runs of a method at one learning rate and number of updates."""
  label: str
  learning_rate: float
  updates: int
  runs: list[regimes.Entry]


def markdown(entries: Sequence[regimes.Entry]) -> str:
  """Returns a table of verdicts for each number of updates, or '' if no two
  methods have `claims.FEWEST` common seeds."""
  groups, parts = _groups(entries), []
  measures = [*_MEASURES, *(
      claims.Measure(name, 'less forgotten (3.3)', name,
                     lambda values: values[-1], -1, 1, 'nats')
      for name in _texts(entries))]
  for updates in sorted({group.updates for group in groups}):
    here = [group for group in groups if group.updates == updates]
    rows = [_row(group, base, contrast)
            for base in here if base.label == claims.BASELINE
            for group in here if group.label != claims.BASELINE
            for contrast in claims.judged(_contrasts(group, base, measures))
            if len(contrast.pairs) >= claims.FEWEST]
    if rows:
      parts.append(f'## {updates} updates a rollout step\n\n'
                   + tables.markdown_of(_HEAD, rows))
  return '\n\n'.join(parts)


def _contrasts(group, base, measures):
  found = (claims.contrast(group, base, measure) for measure in measures)
  return [contrast for contrast in found if contrast]


_HEAD = ('method', 'rate', 'measure', 'result', 'paired difference', 'value',
         claims.BASELINE, 'its rate', 'seeds', 'claim of the paper')


def _row(group, base, found):
  unit = f', {found.unit}' if found.unit else ''
  return [group.label, f'{group.learning_rate:g}', found.title + unit,
          found.verdict,
          *map(overview.with_interval, (found.difference, found.own,
                                        found.base)),
          f'{base.learning_rate:g}', str(len(found.pairs)), found.claim]


def _groups(entries):
  """The runs to compare: without the seeds that chose a learning rate."""
  label, cells = regimes.labels(entries), {}
  for entry in entries:
    key = label[entry.name], entry.learning_rate, entry.updates
    cells.setdefault(key, []).append(entry)
  choosers = {entry.seed for members in cells.values()
              if len(members) < claims.FEWEST for entry in members}
  found = [_Group(*key, [e for e in members if e.seed not in choosers])
           for key, members in sorted(cells.items())]
  return [group for group in found if len(group.runs) >= claims.FEWEST]


def _texts(entries: Iterable[regimes.Entry]):
  """Names of the metrics that are nats per token of a text."""
  return sorted({name for entry in entries for name in entry.metrics
                 if name.endswith(f'/{results.NATS}')})
