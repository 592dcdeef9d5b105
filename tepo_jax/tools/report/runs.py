"""Reads runs from their folders: finished, running or broken.

Every file may be missing or damaged; notes for the report say which are.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import glob
import json
import math
import time
from typing import Any

from configs import fields as fields_lib
from tepo_jax import errors
from tepo_jax.job import configuration
from tepo_jax.job import fork
from tepo_jax.runtime import files
from tepo_jax.runtime import metrics
from tepo_jax.runtime import progress

_FILES = 'config.json', metrics.FILE  # a run's folder has one at least
_MAX_FIELDS = 6  # of a label
_USED = {'seed': int, 'steps': int, 'method_name': str}  # of the config


@dataclasses.dataclass(frozen=True)
class Run:
  """One run.

  name: of its folder, made unique. path: the folder. fields: the config,
  dotted name -> value; None if it cannot be read. records: of metrics.jsonl,
  by step. starts: of environment.jsonl. notes: problems found.
  state: 'finished', or the last step and when it was written.
  parent: of a fork, where it began. branch: the parent, if it was read too.
  """
  name: str
  path: files.Path
  fields: dict[str, Any] | None
  records: list[dict[str, Any]]
  starts: list[dict[str, Any]]
  notes: list[str]
  state: str
  parent: fork.Parent | None = None
  branch: 'Run | None' = None

  @property
  def seed(self) -> int | None:
    return self.fields['seed'] if self.fields else None

  def series(self, metric: str | Callable[[dict], float | None]
             ) -> dict[int, float]:
    """Returns {step: value} of a metric where it is recorded and finite."""
    take = metric if callable(metric) else lambda record: record.get(metric)
    values = {r['step']: take(r) for r in self.records}
    return {step: value for step, value in values.items() if value is not None}

  def joint(self, metric: str | Callable[[dict], float | None]
            ) -> dict[int, float]:
    """Returns {step: value} of a fork's parent at their last common step, from
    which a curve of the fork branches off; {} without one."""
    if self.branch is None:
      return {}
    before = [(step, value)
              for step, value in self.branch.series(metric).items()
              if step <= self.parent.step]
    return dict(before[-1:])


@dataclasses.dataclass(frozen=True)
class Seeds:
  """Runs of one config that differ in the seed. label: for legends."""
  label: str
  runs: list[Run]


def read(paths: Sequence[str]) -> list[Run]:
  """Reads the runs in these folders; expands patterns such as 'runs/tiny/*'.

  Of a folder that is no run itself, it reads all runs below. Copies of a run
  count once, see `_distinct`.

  Raises:
    errors.InputError: a path is not a folder, or no folder has a run.
  """
  folders = [folder for path in paths for folder in _expand(path)]
  runs = _distinct(_with_branches(
      list(map(_read, folders, _unique_names(folders)))))
  if not any(run.records for run in runs):
    raise errors.InputError(
        f'--runs={",".join(paths)}: no metrics.jsonl with a record')
  return runs


def _expand(path):
  is_pattern = glob.has_magic(path)
  folders = [folder for folder in files.found(path)
             if folder.is_dir() or not is_pattern]
  found = [run for folder in folders for run in _at_or_below(folder)]
  if is_pattern:
    found = list(filter(_is_run, found))
  if not found or not all(folder.is_dir() for folder in folders):
    raise errors.InputError(f'--runs: {path} is not the folder of a run')
  return found


def _is_run(folder):
  return any((folder / name).exists() for name in _FILES)


def _at_or_below(folder):
  """The folder if it is a run, or has none below; else all runs below it."""
  if _is_run(folder):
    return [folder]
  return [file.parent for file in files.below(folder, _FILES[1])] or [folder]


def _unique_names(folders):
  """Returns the shortest ends of the paths that are all different."""
  depth, parts = 1, [folder.absolute().parts for folder in folders]
  while depth < max(map(len, parts)) and len(
      {p[-depth:] for p in parts}) < len(set(parts)):
    depth += 1
  return ['/'.join(p[-depth:]) for p in parts]


def _read(folder, name):
  notes = []
  fields = _fields(folder, notes)
  records = sorted(_lines(folder / metrics.FILE, notes, metrics.parse),
                   key=lambda record: record['step'])
  invalid = sum(value is None for r in records for value in r.values())
  if invalid:
    notes.append(f'{invalid} recorded values are NaN or infinite')
  skipped = sum(r.get('skipped') or 0 for r in records)
  if skipped:
    notes.append(f'{skipped:g} updates were skipped: gradient not finite')
  parent = None
  try:
    parent = fork.read(folder)
  except errors.InputError as error:
    notes.append(str(error))
  if parent is not None:
    notes.append(str(parent))
  return Run(name, folder, fields, records,
             _lines(folder / 'environment.jsonl', notes, _start, needed=False),
             notes, _state(folder, fields, records), parent)


def _with_branches(runs):
  """The runs, each fork with its parent if that is among them."""
  by_path = {str(run.path.resolve()): run for run in runs}
  return [run if run.parent is None else dataclasses.replace(
      run, branch=by_path.get(run.parent.run)) for run in runs]


# Two copies of a run have the same values of these, and of all evaluations.
_COMPARED = 'reward', 'accuracy', 'entropy', 'grad_norm'


def _distinct(runs):
  """Leaves out copies, which would count as further seeds.

  Runs of one config, seed, model and code are one run, whatever their folders
  are called: training is deterministic. The longest counts. It has a note of
  each other one, which is also printed to stderr: with the first step at which
  the two differ, if they were resumed in different ways.
  """
  kept = {}
  for run in sorted(runs, key=_last_step, reverse=True):  # stable
    first = kept.setdefault(_identity(run), run)
    if first is run:
      continue
    step = _first_difference(first, run)
    note = f'{run.name} is left out: it is the same run (config, seed, code)'
    if step is not None:
      note = (f'conflict: {run.name} is left out: it has the same config, seed '
              f'and code, but other results from step {step} on')
    first.notes.append(note)
    errors.note(f'{first.name}: {note}')
  counted = {id(run) for run in kept.values()}
  return [run for run in runs if id(run) in counted]


def _last_step(run):
  return run.records[-1]['step'] if run.records else -1


def _identity(run):
  """What copies of a run have in common."""
  if run.fields is None:
    return run.name
  fixed = {name: value for name, value in run.fields.items()
           if configuration.resume_rule(name) != fields_lib.FREE}
  commit = run.starts[0].get('commit') if run.starts else None
  return json.dumps([fixed, commit, _forked(run)], sort_keys=True)


def _forked(run):
  """What forks have in common whose parents differ in the seed only."""
  return run.parent and [
      run.parent.config, run.parent.step, run.parent.keeps_optimizer]


def _first_difference(run, other):
  """The first step whose results differ; None if there is none."""
  results = [{record['step']: {
      name: value for name, value in record.items()
      if name in _COMPARED or name.startswith('eval/')}
              for record in one.records} for one in (run, other)]
  return min((step for step in results[0].keys() & results[1].keys()
              if results[0][step] != results[1][step]), default=None)


def _fields(folder, notes):
  path = folder / 'config.json'
  try:
    fields = fields_lib.flat(json.loads(path.read_text('utf-8')))
    for name, kind in _USED.items():
      if type(fields.get(name)) is not kind:
        raise ValueError(f'{name} is {fields.get(name)!r}')
    return fields
  except FileNotFoundError:
    notes.append('no config.json')
  except (OSError, ValueError, AttributeError, RecursionError) as error:
    notes.append(f'config.json cannot be read: {error}')
  return None


def _start(line):
  """A line of environment.jsonl."""
  record = json.loads(line)
  return record | {'step': int(record['step'])}


def _lines(path, notes, parse, needed=True):
  """The lines that can be read."""
  try:
    lines = path.read_text('utf-8', 'replace').splitlines()
  except OSError:
    if needed:
      notes.append(f'no {path.name}')
    return []
  found, damaged = [], []
  for number, line in enumerate(lines, 1):
    try:
      found.append({
          key: None if isinstance(value, float)
          and not math.isfinite(value) else value
          for key, value in parse(line).items()})
    except (ValueError, TypeError, KeyError, RecursionError):
      damaged.append(number)
  if damaged:
    notes.append(f'{errors.counted(len(damaged), "line")} of {path.name} '
                 f'cannot be read, the first is line {damaged[0]}')
  return found


def _state(folder, fields, records):
  if not records:
    return 'nothing recorded'
  last = records[-1]['step']
  if fields is None:
    return f'at step {last}'
  if last >= fields['steps']:
    return 'finished'
  seconds = max(time.time() - (folder / metrics.FILE).stat().st_mtime, 0)
  return (f'at step {last} of {fields["steps"]}, last written '
          f'{progress.duration(seconds)} ago')


def group(runs: Sequence[Run]) -> list[Seeds]:
  """Groups runs that differ only in the seed, and in fields that change no
  result, in the order of the first runs. A seed that was run again, as with
  other code, counts in a further group: it is no further seed.

  A label is the method's name, followed by the fields that distinguish groups
  of the same method, or the first run's name where these are many or none, and
  of forks by the step at which they began.
  """
  members, again = {}, collections.Counter()
  for run in runs:
    key = run.name if run.fields is None else json.dumps(
        [{name: value for name, value in run.fields.items()
          if not configuration.may_differ_between_seeds(name)},
         _forked(run)], sort_keys=True)
    members.setdefault((key, again[key, run.seed]), []).append(run)
    again[key, run.seed] += 1
  groups = list(members.values())
  # In full where the short labels are the same.
  for shown in (_short, str, None):
    labels = [_label(some, groups, shown) for some in groups]
    if len(set(labels)) == len(labels):
      break
  return list(map(Seeds, labels, groups))


def _short(value):
  """A value of a config in a label: of a path, its last part."""
  text = str(value)
  return text.rstrip('/').rpartition('/')[2] if isinstance(value, str) else text


def _label(some, groups, shown):
  fields = some[0].fields
  if fields is None:
    return some[0].name
  alike = [g[0] for g in groups if g[0].fields is not None
           and g[0].fields['method_name'] == fields['method_name']]
  names = [name for name in differing(alike) if name in fields]
  if shown is None or len(names) > _MAX_FIELDS:
    about = [some[0].name]
  else:
    about = [f'{name}={shown(fields[name])}' for name in names]
  if parent := some[0].parent:
    about.append(f'from step {parent.step}')
  name = fields['method_name']
  return f'{name} ({", ".join(about)})' if about else name


def differing(runs: Sequence[Run]) -> list[str]:
  """Returns the config fields that differ between runs and divide them into
  groups. Runs without a readable config are ignored.
  """
  configs = [run.fields for run in runs if run.fields is not None]
  names = sorted({name for fields in configs for name in fields})
  return [name for name in names
          if not configuration.may_differ_between_seeds(name)
          and len({json.dumps(fields.get(name)) for fields in configs}) > 1]
