"""Writes rollout steps to disk and reads them: one record for each completion.

A step is DIR/step_000012.jsonl, one JSON object a line, or step_000012.parquet
with the same columns. `datasets.load_dataset('json', data_files='DIR/*.jsonl')`
reads them, and `to_groups` restores the groups.

  step            rollout step, from 1
  cursor          the prompt's `prompt_id`, its index in the run's data order
  sample          0 … G − 1 in the group
  set, id         data set and problem
  problem, answers    text; every reference answer
  completion      decoded, without special tokens
  extracted       the final answer found in it, or null
  correct         the grader's verdict; a truncated completion is wrong
  reward          what advantages are computed from: the weighted sum of the
                  reward functions, plus penalties
  reward/NAME     what each reward function other than accuracy gave, or null
  tokens          length in tokens, EOS included
  truncated       true if it was cut at the limit of tokens
  trained         true if the group was trained on
  prompt_ids, token_ids   int32 lists, without padding
  sampler_logp    the sampler's log-probability of each token, nats
  versions        only where completions are carried: the rollout step that drew
                  each token

Every number is written so that it reads back to the same float32.
Axes: B completions · G samples of a prompt · T tokens of a completion.
"""

from collections.abc import Callable
import io
import json
import re

import numpy as np
import pyarrow
from pyarrow import parquet

from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.data import problem as problem_lib
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import sampler
from tepo_jax.runtime import files

FORMATS = ('jsonl', 'parquet')
_MOST_BYTES = 2e9  # of all files

_NAME = re.compile(r'step_(\d{6,})\.(jsonl|parquet)')
_INT, _FLOAT, _TEXT, _BOOL = (
    pyarrow.int32(), pyarrow.float32(), pyarrow.string(), pyarrow.bool_())
_SCHEMA = pyarrow.schema({
    'step': _INT, 'cursor': pyarrow.int64(), 'sample': _INT, 'set': _TEXT,
    'id': _TEXT, 'problem': _TEXT, 'answers': pyarrow.list_(_TEXT),
    'completion': _TEXT, 'extracted': _TEXT, 'correct': _BOOL,
    'reward': _FLOAT, 'tokens': _INT, 'truncated': _BOOL, 'trained': _BOOL,
    'prompt_ids': pyarrow.list_(_INT), 'token_ids': pyarrow.list_(_INT),
    'sampler_logp': pyarrow.list_(_FLOAT)})
FIELDS = _SCHEMA.names
PART = 'reward/'  # begins the columns of reward functions
_VERSIONS = 'versions'


def records(step: int, rollout: sampler.Rollout, name: Callable[[int], str],
            style: str) -> list[dict]:
  """The records of a rollout step.

  name: of the data set of a `prompt_id`. style: of its answers, see
    `answers.extract`.
  """
  rewards = rollout.rewards
  return [
      _record(group, j, name, style) | {
          'step': step, 'trained': n in rollout.trained,
          'reward': float(str(rewards.reward_NG[n, j]))} | {
              PART + part: None if np.isnan(part_NG[n, j]) else
              float(str(part_NG[n, j]))
              for part, part_NG in rewards.parts.items()}
      for n, group in enumerate(rollout.completed)
      for j in range(len(group.text_G))]


def _record(group, j, name, style):
  length = int(group.length_G[j])
  problem = group.prompt.problem
  return {
      'cursor': group.prompt.prompt_id, 'sample': j,
      'set': name(group.prompt.prompt_id),
      'id': problem.id, 'problem': problem.problem,
      'answers': list(problem.answers), 'completion': group.text_G[j],
      'extracted': grading.extract(group.text_G[j], style),
      'correct': bool(group.accuracy_G[j]),
      'tokens': length, 'truncated': not group.ended_G[j],
      'prompt_ids': list(map(int, group.prompt.token_ids)),
      'token_ids': group.token_GT[j, :length].tolist(),
      'sampler_logp': [float(str(x)) for x in group.logp_GT[j, :length]]} | (
          {} if group.version_GT is None else
          {_VERSIONS: group.version_GT[j, :length].tolist()})


def write(directory: files.Path, step: int, lines: list[dict], form: str
          ) -> None:
  """Writes a step's records atomically, and deletes the oldest steps while all
  take more than 2 GB; never the step just written."""
  directory.mkdir(exist_ok=True)
  path = directory / f'step_{step:06d}.{form}'
  with files.replacing(path) as temporary:
    if form == 'parquet':
      schema = pyarrow.schema([*_SCHEMA, *(
          pyarrow.field(name, pyarrow.list_(_INT) if name == _VERSIONS
                        else _FLOAT) for name in _further(lines[0]))])
      parquet.write_table(pyarrow.Table.from_pylist(lines, schema), temporary)
    else:
      with temporary.open('w', encoding='utf-8') as file:
        names = [*FIELDS, *_further(lines[0])]
        file.writelines(json.dumps({k: line[k] for k in names}) + '\n'
                        for line in lines)
  _bound(directory, path)


def _further(line):
  """The columns of reward functions, and the versions, if there are any."""
  return [name for name in line
          if name.startswith(PART) or name == _VERSIONS]


def _bound(directory, newest):
  sizes = files.sizes(directory)
  paths = {path: sizes[path.name] for path in _paths(directory).values()}
  for path in list(paths):
    if sum(paths.values()) <= _MOST_BYTES:
      return
    if path != newest:
      path.unlink()
      del paths[path]


def _paths(directory):
  """{step: path} of the files, oldest first."""
  entries = directory.iterdir() if directory.is_dir() else ()
  found = filter(None, (_NAME.fullmatch(entry.name) for entry in entries))
  return dict(sorted((int(m[1]), directory / m[0]) for m in found))


def steps(directory: files.Path) -> list[int]:
  """The steps in a directory, ascending."""
  return list(_paths(directory))


def read(directory: files.Path, step: int) -> list[dict]:
  """The records of a step.

  Raises:
    errors.InputError: no such step, or a damaged file; says which.
  """
  paths = _paths(directory)
  if step not in paths:
    raise errors.InputError(
        f'{directory}: no rollout of step {step} (has: {_some(paths)})')
  try:
    data = paths[step].read_bytes()
    if paths[step].suffix == '.parquet':
      lines = parquet.read_table(io.BytesIO(data)).to_pylist()
    else:
      lines = list(map(json.loads, data.decode().splitlines()))
    if not lines or any(set(FIELDS) - line.keys() for line in lines):
      raise ValueError('not the records of a rollout')
  except (OSError, ValueError, AttributeError, pyarrow.ArrowException
          ) as error:
    raise errors.InputError(f'{paths[step]}: {error}') from error
  return lines


def to_groups(lines: list[dict], length: int) -> list[groups_lib.Group]:
  """The groups that were sampled, in the order in which they were written.

  `lines` are from `read`; completions are padded to T = `length`.
  """
  by_prompt = {}
  for line in lines:
    by_prompt.setdefault(line['cursor'], []).append(line)
  return [_group(members, length) for members in by_prompt.values()]


def rewards(lines: list[dict]) -> np.ndarray:
  """The rewards of the completions, in the order of the lines, float32 [B]."""
  return np.array([line['reward'] for line in lines], np.float32)


def _group(members, length):
  def padded(name, dtype):
    array_GT = np.zeros((len(members), length), dtype)
    for value_T, member in zip(array_GT, members):
      value_T[:len(member[name])] = member[name]
    return array_GT

  first = members[0]
  problem = problem_lib.Problem(
      id=first['id'], problem=first['problem'],
      answers=tuple(first['answers']), source=first['set'])
  return groups_lib.Group(
      prompt=groups_lib.Prompt(
          problem, tuple(first['prompt_ids']), first['cursor']),
      token_GT=padded('token_ids', np.int32),
      logp_GT=padded('sampler_logp', np.float32),
      length_G=np.array([m['tokens'] for m in members], np.int32),
      ended_G=np.array([not m['truncated'] for m in members]),
      text_G=tuple(m['completion'] for m in members),
      accuracy_G=np.array([m['correct'] for m in members], np.float32),
      version_GT=padded(_VERSIONS, np.int32) if _VERSIONS in first else None)


def _some(found):
  found = list(map(str, found))
  if len(found) > 8:
    found = found[:4] + ['…'] + found[-4:]
  return ', '.join(found) or 'none'
