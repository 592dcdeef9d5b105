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
from tepo_jax.tools.report import drawing
from tepo_jax.tools.report import figures
from tepo_jax.tools.report import runs as runs_lib
from tepo_jax.tools.report import tables

# Name in the file -> metric of a record.
KEPT = {'entropy': 'entropy', 'tokens': 'response_length_mean',
         'clip': figures.clip_ratio, 'gradient': 'grad_norm',
         'accuracy': 'accuracy'}

# Runs of one map may differ in fields that a resume may change except `steps`,
# and in these: they are compared (models by `start_kl`), or change neither the
# training nor what 'evaluation' means.
_FREE_FIELDS = frozenset((
    'seed', 'optimizer.learning_rate', 'train.minibatch_prompts',
    'train.epochs', 'data.date', 'eval.limit', 'eval.period', 'eval.before',
    'eval.greedy', 'eval.texts', 'model'))
_FREE_SECTIONS = ('method', 'dump.')  # also method_name

# Maps written before `method.reference` existed lack these fields; none of
# their runs has a reference policy.
_NO_REFERENCE = fields_lib.flat({'reference': methods.reference_kl()})


@dataclasses.dataclass(frozen=True)
class Entry:
  """One run of the map.

  name: the end of its folder's path, unique in the map. method: dotted name ->
  value. updates: per rollout step. metrics: name -> {step: value}: those of
  KEPT; 'evaluation', avg@k of the first set in eval.sets; the other evaluations
  and the texts, by their names of a record; 'start_kl', see `start_kl`.
  config: the fields in which all runs of a map must agree; empty in older maps.
  """
  name: str
  method_name: str
  method: dict[str, Any]
  learning_rate: float
  updates: int
  seed: int
  metrics: dict[str, dict[int, float]]
  config: dict[str, Any] = dataclasses.field(default_factory=dict)

  def last(self, metric: str) -> float:
    """Returns the metric at its last step."""
    return list(self.metrics[metric].values())[-1]

  def series(self, metric: str) -> dict[int, float]:
    """Returns {step: value}, empty if the metric was not recorded."""
    return self.metrics.get(metric, {})


def update(path: files.Path, runs: Sequence[runs_lib.Run]) -> list[Entry]:
  """Adds the finished runs that the file lacks; returns all entries, by name.

  A file that lacks none is not written. Runs that are left out are named on
  stderr: without them a method could look better than it is.

  Raises:
    errors.InputError: the file is damaged, nothing is in it, or a new run
      differs from the others in a field that is not compared.
  """
  entries = {entry.name: entry for entry in read(path)} if path.exists() else {}
  new = _new(entries, runs)
  _check_config(path, entries.values(), [entry for _, entry in new])
  moved = start_kl([run for run, _ in new])
  for run, entry in new:
    entry.metrics['start_kl'] = _rounded(moved[run.name])
    entries[entry.name] = entry
  if not entries:
    raise errors.InputError(f'{path}: no finished run to map')
  if new:
    lines = [json.dumps(dataclasses.asdict(entries[name])) + '\n'
             for name in sorted(entries)]
    with files.replacing(path) as temporary:
      temporary.write_bytes(gzip.compress(''.join(lines).encode(), mtime=0))
  return [entries[name] for name in sorted(entries)]


def _new(entries, runs):
  """(run, its entry without start_kl) for each finished run that the map lacks.

  A name does not identify a run: it depends on the other folders that are read.
  The map has one run for each method, learning rate, number of updates and
  seed, because a second one would count as a further seed. A second one with
  other results is named on stderr.
  """
  found, names = [], set(entries)
  known = {_identity(entry): entry for entry in entries.values()}
  for run in runs:
    if run.state != 'finished' or run.fields is None:
      errors.note(f'not in the map: {run.name}: {run.state}')
      continue
    entry = _entry(run)
    if first := known.get(_identity(entry)):
      if not _have_same_results(first, entry):
        errors.note(f'not in the map: {run.path}: {first.name} in it has the '
                    'same method, learning rate, updates and seed, but other '
                    'results')
      continue
    entry = dataclasses.replace(entry, name=_free_name(run, names))
    known[_identity(entry)] = entry
    names.add(entry.name)
    found.append((run, entry))
  return found


def _identity(entry):
  return json.dumps([entry.method_name, entry.method, entry.learning_rate,
                     entry.updates, entry.seed], sort_keys=True)


def _have_same_results(entry, other):
  """Compares the metrics that both have: an older map lacks some, and a new
  entry has no start_kl yet."""
  names = entry.metrics.keys() & other.metrics.keys()
  return all(entry.metrics[name] == other.metrics[name] for name in names)


def _free_name(run, names):
  """The run's name, or a longer end of its path if another run has that."""
  parts = run.path.absolute().parts
  for depth in range(run.name.count('/') + 1, len(parts) + 1):
    if (name := '/'.join(parts[-depth:])) not in names:
      return name
  raise errors.InputError(f'{run.path}: the map has another run of this path')


def _check_config(path, entries, new):
  """Refuses a new entry whose config differs from that of the others."""
  known = {}  # {field: (value, name of the first run that has it)}
  for entry in entries:
    for name, value in entry.config.items():
      known.setdefault(name, (value, entry.name))
  for entry in new:
    differing = []
    for name, value in entry.config.items():
      first, other = known.setdefault(name, (value, entry.name))
      if value != first:
        differing.append(f'{name} ({json.dumps(value)}, but {json.dumps(first)}'
                         f' in {other})')
    if differing:
      raise errors.InputError(
          f'{path}: {entry.name} is not comparable with the other runs: it '
          f'differs in {errors.listed(differing)}')


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


def _entry(run):
  """The entry of a run, still without start_kl."""
  fields, first = run.fields, _first_evaluation(run)
  metrics = {name: run.series(metric) for name, metric in KEPT.items()}
  metrics['evaluation'] = run.series(first)
  metrics |= {name: run.series(name) for name in (
      *figures.accuracies([run]), *figures.texts([run])) if name != first}
  try:
    return Entry(
        run.name, fields['method_name'], _NO_REFERENCE | {
            name.removeprefix('method.'): value
            for name, value in fields.items() if name.startswith('method.')},
        fields['optimizer.learning_rate'],
        fields['rollout.prompts'] // fields['train.minibatch_prompts']
        * fields['train.epochs'], run.seed,
        {name: _rounded(series) for name, series in metrics.items()},
        _config(fields))
  except KeyError as error:
    raise errors.InputError(
        f'{run.path}/config.json: {error.args[0]} is missing') from error


def _first_evaluation(run):
  """The recorded name of avg@k of the first set in eval.sets: a record has the
  evaluations in that order."""
  for record in run.records:
    for name in record:
      if name.startswith('eval/') and '/avg@' in name:
        return name
  raise errors.InputError(f'{run.path}: the run was never evaluated')


def _rounded(series):
  return {step: float(f'{value:.5g}') for step, value in series.items()}


def _config(fields):
  """The fields in which the runs of a map must agree."""
  return {name: value for name, value in fields.items() if name == 'steps' or (
      configuration.resume_rule(name) == fields_lib.SAME
      and name not in _FREE_FIELDS and not name.startswith(_FREE_SECTIONS))}


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
  drawing.draw_matrix(
      rows, [f'{count} updates, {_short(rate)}' for count, rate in columns],
      matrix,
      'Accuracy at the end, %, by updates per rollout step and learning rate',
      out / 'map', '.0f')
