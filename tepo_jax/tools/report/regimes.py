"""A map of methods over learning rates and updates per rollout step.

A regime is a learning rate and a number of updates. The map is a file of one
JSON line per run, compressed, so that runs made elsewhere can be added. Where
does each method end, and how far has it moved from the model it started from?
"""

from collections.abc import Iterable, Sequence
import dataclasses
import gzip
import json
import pathlib
import sys
from typing import Any
import zlib

import numpy as np

from configs import fields as fields_lib
from configs import methods
from tepo_jax import errors
from tepo_jax.job import configuration
from tepo_jax.job import learner as learner_lib
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.rollout import dump
from tepo_jax.runtime import files
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools.report import figures
from tepo_jax.tools.report import runs as runs_lib
from tepo_jax.tools.report import tables

# Name in the file -> metric of a record.
KEPT = {'entropy': 'entropy', 'tokens': 'response_length_mean',
         'clip': figures.clip_ratio, 'gradient': 'grad_norm',
         'accuracy': 'accuracy'}

# Maps written before `method.reference` existed lack these fields; none of
# their runs has a reference policy.
_NO_REFERENCE = fields_lib.flat({'reference': methods.reference_kl()})


@dataclasses.dataclass(frozen=True)
class Entry:
  """One run of the map.

  name: of its folder. method: dotted name -> value. updates: per rollout step.
  metrics: name -> {step: value}: those of KEPT; 'evaluation', avg@k of the
  first set; the other evaluations and the texts, by their names of a
  record; 'start_kl', see `start_kl`.
  """
  name: str
  method_name: str
  method: dict[str, Any]
  learning_rate: float
  updates: int
  seed: int
  metrics: dict[str, dict[int, float]]

  def last(self, metric: str) -> float:
    """Returns the metric at its last step."""
    return list(self.metrics[metric].values())[-1]

  def series(self, metric: str) -> dict[int, float]:
    """Returns {step: value}, empty if the metric was not recorded."""
    return self.metrics.get(metric, {})


def update(path: files.Path, runs: Sequence[runs_lib.Run]) -> list[Entry]:
  """Adds the finished runs that the file lacks, by name; returns all entries.

  A file that lacks none is not written. Others are named on stderr: without
  them a method could look better than it is.

  Raises:
    errors.InputError: the file is damaged, or nothing is in it.
  """
  entries = {entry.name: entry for entry in read(path)} if path.exists() else {}
  new = [run for run in runs if run.name not in entries]
  for run in new:
    if run.state != 'finished':
      print(f'not in the map: {run.name}: {run.state}', file=sys.stderr)
  new = [run for run in new if run.state == 'finished' and run.fields]
  moved = start_kl(new)
  entries |= {run.name: _entry(run, moved[run.name]) for run in new}
  if not entries:
    raise errors.InputError(f'{path}: no finished run to map')
  if new:
    lines = [json.dumps(dataclasses.asdict(entries[name])) + '\n'
             for name in sorted(entries)]
    with files.replacing(path) as temporary:
      temporary.write_bytes(gzip.compress(''.join(lines).encode(), mtime=0))
  return [entries[name] for name in sorted(entries)]


def read(path: files.Path) -> list[Entry]:
  """Reads the entries of a map.

  Raises:
    errors.InputError: the file cannot be read; says why.
  """
  try:
    text = gzip.decompress(path.read_bytes()).decode()
    found = [Entry(**json.loads(line)) for line in text.splitlines()]
    return [dataclasses.replace(
        entry, method=_NO_REFERENCE | entry.method, metrics={
            name: {int(step): value for step, value in series.items()}
            for name, series in entry.metrics.items()}) for entry in found]
  except (OSError, EOFError, zlib.error, ValueError, TypeError, AttributeError
          ) as error:
    raise errors.InputError(f'{path}: {error}') from error


def _entry(run, moved):
  fields = run.fields
  evaluation = figures.accuracies([run])
  if not evaluation:
    raise errors.InputError(f'{run.path}: the run was never evaluated')
  metrics = {name: run.series(metric) for name, metric in KEPT.items()}
  metrics |= {'evaluation': run.series(evaluation[0]), 'start_kl': moved}
  others = [*evaluation[1:], *figures.texts([run])]
  metrics |= {name: run.series(name) for name in others}
  return Entry(
      run.name, fields['method_name'],
      {name.removeprefix('method.'): value for name, value in fields.items()
       if name.startswith('method.')},
      fields['optimizer.learning_rate'],
      fields['rollout.prompts'] // fields['train.minibatch_prompts']
      * fields['train.epochs'], run.seed,
      {name: {step: float(f'{value:.5g}') for step, value in series.items()}
       for name, series in metrics.items()})


def start_kl(runs: Sequence[runs_lib.Run]) -> dict[str, dict[int, float]]:
  """Returns, by run, {step: nats}: KL(policy ‖ starting policy) per token.

  It is the mean of log π − log π_start over the tokens sampled in a quarter,
  half, three quarters and all of the steps, before these steps' updates.
  π_start is loaded once: all runs must start from one model.

  Raises:
    errors.InputError: the runs start from different models, another version
      made the first one, or a rollout is missing.
  """
  if not runs:
    return {}
  models = {run.fields['model'] for run in runs}
  if len(models) > 1 or None in models:
    raise errors.InputError(
        f'the runs of a map must start from one config.model, not {models}')
  config = run_folder.read_config(runs[0].path)
  configuration.check_saved(config, f'{runs[0].path}/config.json')
  with session_lib.open_folder(
      config, session_lib.model_folder(config, runs[0].path)) as session:
    learner = learner_lib.Learner(config, session)
    learner.load_base()
    learner.state = learner.first_state()
    return {run.name: {step: _moved(learner, dump.to_groups(
        dump.read(run.path / session_lib.ROLLOUTS, step),
        config.rollout.max_tokens)) for step in _quarters(run.fields['steps'])}
            for run in runs}


def _quarters(steps):
  return sorted({max(1, round(steps * part / 4)) for part in (1, 2, 3, 4)})


def _moved(learner, groups):
  """Mean log π − log π_start of the groups' tokens."""
  rollout, total, count = learner.config.rollout, 0.0, 0
  for first in range(0, len(groups), rollout.prompts):
    some = groups[first:first + rollout.prompts]
    batch = learner.to_batch(
        some, np.zeros(len(some) * rollout.samples), 'grpo')  # no advantages
    logp_BT, _ = learner.programs.score(
        learner.state.params, learner.on_devices(batch), *learner.base())
    gap_BT = batch.sampler_logp_BT - mesh_lib.to_host(logp_BT)
    total += float(gap_BT[batch.mask_BT > 0].sum(dtype=np.float64))
    count += int(batch.mask_BT.sum())
  return total / count


def labels(entries: Iterable[Entry]) -> dict[str, str]:
  """Returns a label by run: the method, with what differs in its numbers."""
  of_method, found = {}, {}
  for entry in entries:
    of_method.setdefault(entry.method_name, []).append(entry)
  for name, members in of_method.items():
    keys = {key for entry in members for key in entry.method}
    differing = sorted(key for key in keys if len(
        {json.dumps(entry.method[key]) for entry in members}) > 1)
    for entry in members:
      numbers = ', '.join(f'{key}={entry.method[key]}' for key in differing)
      found[entry.name] = f'{name} ({numbers})' if numbers else name
  return found


def table(entries: Sequence[Entry]) -> str:
  """Returns the map in Markdown: a row for each method and learning rate."""
  label = labels(entries)
  updates = sorted({entry.updates for entry in entries})
  rows = []
  for name, rate in sorted({(label[e.name], e.learning_rate) for e in entries}):
    rows.append([name, _short(rate), *(
        _cell([e for e in entries if (
            label[e.name], e.learning_rate, e.updates) == (name, rate, count)])
        for count in updates)])
  return tables.markdown_of(
      ['method', 'learning rate', *(f'{count} updates' for count in updates)],
      rows)


def _short(rate):
  """0.0001 -> '1e-4'."""
  return np.format_float_scientific(rate, trim='-', exp_digits=1)


def _cell(members):
  """Accuracy at the end and of the samples in the middle of the run; KL to the
  start, entropy, tokens; means over seeds, whose number follows."""
  if not members:
    return ''
  score, moved, entropy, tokens = (
      np.mean([entry.last(name) for entry in members])
      for name in ('evaluation', 'start_kl', 'entropy', 'tokens'))
  middle = np.mean([_middle(entry.series('accuracy')) for entry in members])
  seeds = f', {len(members)} seeds' if len(members) > 1 else ''
  return (f'**{100 * score:.1f}** (middle {100 * middle:.1f}, KL {moved:.2g}, '
          f'H {entropy:.2g}, {tokens:.0f} tokens{seeds})')


def _middle(series):
  """Mean over the steps after 0.3 and up to 0.7 of the run, as 4 to 7 of 10;
  NaN if there are none."""
  steps = max(series, default=0)
  values = [value for step, value in series.items()
            if 0.3 * steps < step <= 0.7 * steps]
  return np.mean(values) if values else np.nan


def best(entries: Sequence[Entry]) -> list[Entry]:
  """Returns each method's run with the highest last evaluation at each number
  of updates, among those with the lowest seed: later seeds are no contestants,
  as only the best learning rates have them."""
  label, found = labels(entries), {}
  for entry in entries:
    if entry.seed == min(entry.seed for entry in entries):
      key = label[entry.name], entry.updates
      if key not in found or (
          entry.last('evaluation') > found[key].last('evaluation')):
        found[key] = entry
  return list(found.values())


def draw(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """Writes map.png and map.svg: the last evaluation in each regime."""
  label = labels(entries)
  rows = sorted(set(label.values()))
  columns = sorted({(e.updates, e.learning_rate) for e in entries})
  cells = {}
  for entry in entries:
    key = label[entry.name], (entry.updates, entry.learning_rate)
    cells.setdefault(key, []).append(100 * entry.last('evaluation'))
  matrix = [[np.mean(cells[row, column]) if (row, column) in cells else np.nan
             for column in columns] for row in rows]
  figures.draw_matrix(
      rows, [f'{count} updates, {_short(rate)}' for count, rate in columns],
      matrix,
      'Accuracy at the end, %, by updates per rollout step and learning rate',
      out / 'map', '.0f')
