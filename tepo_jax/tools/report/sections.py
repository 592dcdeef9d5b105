"""Report sections that need a run's model: token inspector and replay.

`--inspect` and `--replay` replay a rollout step of each run (see `replay`);
this module writes the results as files and formats them for the page.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import json
import pathlib
from typing import Any

import ml_collections
import numpy as np

from tepo_jax import errors
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.policy.huggingface import weights
from tepo_jax.rollout import dump
from tepo_jax.runtime import disk
from tepo_jax.runtime import files
from tepo_jax.runtime import progress as progress_lib
from tepo_jax.tools.report import claims
from tepo_jax.tools.report import drawing
from tepo_jax.tools.report import inspector
from tepo_jax.tools.report import page
from tepo_jax.tools.report import replay
from tepo_jax.tools.report import runs as runs_lib

_BETA = 1e-3  # TEPO's KL coefficient where the run's method has none


def inspectors(runs: Sequence[runs_lib.Run], step: int | None,
               out: pathlib.Path) -> list[dict[str, Any]]:
  """Returns `inspector.payload` of each run's step.

  Without a step: the last rollout of each method's first run, without values
  that need the model. With one, this also writes every array to
  DIR/inspect_RUN_STEP.jsonl, one line per completion.

  Raises:
    errors.InputError: no run has that step.
  """
  if step is None:
    return _each([g.runs[0] for g in runs_lib.group(runs)], _last_rollout)
  return _of_step(runs, _inspect, step, out)


def replays(runs: Sequence[runs_lib.Run], step: int | None, out: pathlib.Path,
            methods: Callable[[float], Mapping[str, Any]]
            ) -> list[tuple[str, str]]:
  """Returns report sections; writes DIR/replay_RUN_STEP.json and heat maps.

  `methods` maps TEPO's KL coefficient to the paper's methods.
  """
  return [] if step is None else _of_step(runs, _replay, step, out, methods)


def _each(runs, function, *arguments):
  """Returns results by run, without None; errors are printed to stderr."""
  found = []
  for run in runs:
    try:
      found.append(function(run, *arguments))
    except errors.InputError as error:
      errors.note(f'{run.name}: {error}')
  return [item for item in found if item is not None]


def _of_step(runs, function, *arguments):
  found = _each(runs, function, *arguments)
  if not found:
    raise errors.InputError('no run of --runs has that step, see above')
  return found


def _last_rollout(run):
  steps = dump.steps(run.path / session_lib.ROLLOUTS)
  if not steps or run.fields is None:
    return None
  records = dump.read(run.path / session_lib.ROLLOUTS, steps[-1])
  tokenizer = weights.load_tokenizer(session_lib.model_folder(
      run_folder.read_config(run.path), run.path))
  surprise_BT = np.zeros(
      (len(records), max(r['tokens'] for r in records)), np.float32)
  for surprise_T, record in zip(surprise_BT, records):
    surprise_T[:record['tokens']] = -np.float32(record['sampler_logp'])
  return inspector.payload(
      records, lambda token: tokenizer.decode([token]),
      {'surprise': surprise_BT}, run.fields,
      title=f'{run.name}, step {steps[-1]}',
      about='From the saved rollout only; --inspect shows more values.')


def _inspect(run, step, out):
  with replay.open_step(run.path, step) as opened:
    method = opened.learner.config.method.to_dict()
    region = f'the method\'s region, {method["reg"]["region"]}'
    if method['reg']['region'] == 'none':
      method['reg'] |= dict(region='positive_falling', coef=0.0)
      region = 'TEPO\'s region (A > 0, ΔH < 0), which this run does not use'
    records = dump.read(run.path / session_lib.ROLLOUTS, step)
    opened.finish()
    arrays = inspector.values(opened.view(method))
    tokenizer = opened.learner.session.tokenizer
  path = out / f'inspect_{run.name.replace("/", "_")}_{step}.jsonl'
  with disk.naming(path), path.open('w', encoding='utf-8') as file:
    for index, record in enumerate(records):
      file.write(json.dumps({name: record[name] for name in (
          'cursor', 'sample', 'token_ids')} | {
              key: inspector.exact(value_BT[index, :record['tokens']])
              for key, value_BT in arrays.items()}) + '\n')
  return inspector.payload(
      records, lambda token: tokenizer.decode([token]), arrays, run.fields,
      title=f'{run.name}, step {step}', about=(
          f'"Before" is the policy that sampled step {step}; "after" is after '
          f'all of the step\'s updates. M is {region}.'))


def _replay(run, step, out, methods):
  with replay.open_step(run.path, step) as opened:
    method = opened.learner.config.method
    is_tepo = method.reg.penalty == 'kl_full' and method.reg.coef > 0
    chosen = dict(methods(method.reg.coef if is_tepo else _BETA))
    if method.to_dict() not in [
        ml_collections.ConfigDict(row).to_dict() for row in chosen.values()]:
      chosen['this run'] = method
    with contextlib.closing(progress_lib.Progress(step)) as shown:
      comparisons = opened.compare(
          chosen, lambda text: shown.phase(f'replay of {run.name}: {text}'))
  name = f'replay_{run.name.replace("/", "_")}_{step}'
  files.replace_text(out / f'{name}.json', json.dumps({
      'run': run.name, 'step': step,
      'comparisons': list(map(_numbers, comparisons))}, indent=1) + '\n')
  for index, item in enumerate(comparisons):
    drawing.draw_heat_map(
        list(item.outcomes), replay.cosines(list(item.outcomes.values())),
        f'{run.name}, step {step}, {item.where}', out / f'{name}_{index}')
  return f'Replay: {run.name}, step {step}', _sections(comparisons)


def _numbers(comparison):
  rows = {name: {key: value for key, value in vars(outcome).items()
                 if key != 'gradient'}
          for name, outcome in comparison.outcomes.items()}
  return {'where': comparison.where, 'tokens': comparison.tokens, 'rows': rows,
          'identical': replay.identical(comparison.outcomes),
          'cosines': replay.cosines(
              list(comparison.outcomes.values())).tolist()}


# (heading, field of Outcome, factor, digits).
_COLUMNS = (
    ('loss', 'loss', 1, 5), ('gradient norm', 'grad_norm', 1, 4),
    ('clip %', 'clip_fraction', 100, 2), ('in M %', 'region_share', 100, 2),
    ('ΔH predicted, mnat', 'entropy_predicted', 1e3, 4),
    ('ΔH measured, mnat', 'entropy_measured', 1e3, 4))


def _sections(comparisons):
  """Returns the last update first, the others folded."""
  last, *others = map(_section, comparisons[::-1])
  return (f'<h3>{page.text(comparisons[-1].where)}</h3>{last}' + ''.join(
      f'<details><summary>{page.text(comparison.where)}</summary>{content}'
      '</details>' for comparison, content in zip(comparisons[-2::-1], others)))


def _section(comparison):
  numbers = _numbers(comparison)
  names, rows = list(numbers['rows']), numbers['rows']
  heads = [group[0] for group in numbers['identical']]
  base = claims.BASELINE if claims.BASELINE in rows else names[0]
  group_of = {name: group for group in numbers['identical'] for name in group}
  base_head = group_of[base][0]
  heads.sort(key=lambda name: name != base_head)  # the baseline's row first
  index = [names.index(name) for name in heads]
  cosine = {name: numbers['cosines'][names.index(base)][i]
            for name, i in zip(heads, index)}
  table = [[', '.join(group_of[name]), f'{cosine[name]:.3f}', *(
      _cell([factor * rows[member][field] for member in group_of[name]],
            None if name == base_head else factor * rows[base][field], digits)
      for _, field, factor, digits in _COLUMNS)] for name in heads]
  head = ['method', f'cosine with {base}', *(title for title, *_ in _COLUMNS)]
  content = (
      f'<p class="caption">{comparison.tokens:,} tokens, the same for every '
      f'method; {len(names)} methods make {len(heads)} different updates here: '
      f'the gradients of one row differ by at most {replay.SAME:.1%}. In '
      f'brackets: the difference to {page.text(base)}; a … b: the row\'s least '
      'and largest. ΔH: change of the tokens\' mean '
      'entropy by one optimiser update, predicted to first order and measured.'
      '</p>' + page.table(head, table, range(1, len(head))))
  if len(heads) > 1:
    content += (
        '<details><summary>Cosines between the gradients of the rows</summary>'
        + page.heat_map([_short(group_of[name]) for name in heads], [
            [numbers['cosines'][i][j] for j in index] for i in index])
        + '</details>')
  return content


def _cell(values, base, digits):
  """The value of a row's methods, and its difference to `base` unless None."""
  low, high = (f'{end(values):.{digits}f}' for end in (min, max))
  if low != high:
    return f'{low} … {high}'
  return low if base is None else f'{low} ({values[0] - base:+.{digits}f})'


def _short(group):
  return group[0] + (f' + {len(group) - 1}' if len(group) > 1 else '')
