"""What a report takes from a run's model: inspected tokens, replayed steps."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import pathlib
import sys
from typing import Any

import ml_collections
import numpy as np

from tepo_jax import errors
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.policy.huggingface import weights
from tepo_jax.rollout import dump
from tepo_jax.tools.report import figures
from tepo_jax.tools.report import inspector
from tepo_jax.tools.report import page
from tepo_jax.tools.report import replay
from tepo_jax.tools.report import replay_rows
from tepo_jax.tools.report import runs as runs_lib

_BETA = 1e-3  # of TEPO's rows beside a run that has none


def inspectors(runs: Sequence[runs_lib.Run], step: int | None,
               out: pathlib.Path) -> list[dict[str, Any]]:
  """`inspector.payload` of the runs' step.

  Without a step: the last rollout of each method's first run, with what the
  dump alone tells. With one, every array is also written to
  DIR/inspect_RUN_STEP.jsonl, a line for each record of the dump.

  Raises:
    errors.InputError: no run has that step.
  """
  if step is None:
    firsts = [group.runs[0] for group in runs_lib.group(runs)]
    found = _each(firsts, _glance)
    return [payload for payload in found if payload is not None]
  return _needed(_each(runs, lambda run: _inspect(run, step, out)))


def replays(runs: Sequence[runs_lib.Run], step: int | None, out: pathlib.Path,
            rows: Callable[[float], Mapping[str, Any]]
            ) -> list[tuple[str, str]]:
  """Report sections; also DIR/replay_RUN_STEP.json, and the heat maps.

  `rows` gives the paper's rows from TEPO's KL coefficient.
  """
  if step is None:
    return []
  return _needed(_each(runs, lambda run: _replay(run, step, out, rows)))


def _each(runs, look):
  """What `look` gives of each run; a refusal is kept, and told on stderr."""
  found = []
  for run in runs:
    try:
      found.append(look(run))
    except errors.InputError as error:
      print(f'{run.name}: {error}', file=sys.stderr)
      found.append(None)
  return found


def _needed(found):
  there = [item for item in found if item is not None]
  if not there:
    raise errors.InputError('no run of --runs has that step, see above')
  return there


def _glance(run):
  steps = dump.steps(run.path / session_lib.ROLLOUTS)
  if not steps or run.fields is None:
    return None
  rows = dump.read(run.path / session_lib.ROLLOUTS, steps[-1])
  config = run_folder.read_config(run.path)
  tokenizer = weights.load_tokenizer(
      session_lib.model_folder(config, run.path))
  slots = max(row['tokens'] for row in rows)
  arrays = {'surprise': -_padded([r['sampler_logp'] for r in rows], slots)}
  return inspector.payload(
      rows, _decoder(tokenizer), arrays, title=f'{run.name}, step {steps[-1]}',
      about='Only what the rollout itself tells; --inspect shows more.')


def _padded(lists, slots):
  array_BT = np.zeros((len(lists), slots), np.float32)
  for row, values in zip(array_BT, lists):
    row[:len(values)] = values
  return array_BT


def _decoder(tokenizer):
  return lambda token: tokenizer.decode([token])


def _inspect(run, step, out):
  with replay.open_step(run.path, step) as opened:
    config = opened.learner.config
    rows = dump.read(run.path / session_lib.ROLLOUTS, step)
    opened.finish()
    view = opened.view(_with_region(config.method))
    arrays = inspector.values(view.batch, view.logp_BT, view.entropy_BT,
                              view.kl_BT, view.selection)
    decode = _decoder(opened.learner.session.tokenizer)
  path = out / f'inspect_{_file_name(run)}_{step}.jsonl'
  with path.open('w', encoding='utf-8') as file:
    for index, row in enumerate(rows):
      file.write(json.dumps({name: row[name] for name in (
          'cursor', 'sample', 'token_ids')} | {
              key: inspector.exact(value_BT[index, :row['tokens']])
              for key, value_BT in arrays.items()}) + '\n')
  return inspector.payload(
      rows, decode, arrays, title=f'{run.name}, step {step}',
      about=_about(config.method, step))


def _with_region(row):
  """The row; TEPO's region where it has none, to look at."""
  row = row.to_dict()
  if row['reg']['region'] == 'none':
    row['reg'] |= dict(region='positive_falling', coef=0.0)
  return row


def _about(row, step):
  region = ('the row\'s own, ' + row.reg.region if row.reg.region != 'none'
            else 'TEPO\'s (A > 0, ΔH < 0), which this run does not use')
  return (f'Before: the policy that sampled step {step}; after: all of the '
          f'step\'s updates. M: {region}.')


def _replay(run, step, out, rows):
  with replay.open_step(run.path, step) as opened:
    method = opened.learner.config.method
    chosen = dict(rows(_beta(method)))
    if method.to_dict() not in [_plain(row) for row in chosen.values()]:
      chosen['this run'] = method
    comparisons = opened.compare(chosen)
  name = f'replay_{_file_name(run)}_{step}'
  (out / f'{name}.json').write_text(json.dumps({
      'run': run.name, 'step': step,
      'comparisons': list(map(_numbers, comparisons))}, indent=1) + '\n')
  for index, item in enumerate(comparisons):
    figures.draw_heat_map(
        list(item.outcomes), replay_rows.cosines(list(item.outcomes.values())),
        f'{run.name}, step {step}, {item.where}', out / f'{name}_{index}')
  return (f'Replay: {run.name}, step {step}',
          ''.join(map(_section, comparisons)))


def _plain(row):
  return ml_collections.ConfigDict(row).to_dict()


def _beta(method):
  is_tepo = method.reg.penalty == 'kl_full' and method.reg.coef > 0
  return method.reg.coef if is_tepo else _BETA


def _numbers(comparison):
  rows = {name: {field.name: getattr(outcome, field.name)
                 for field in dataclasses.fields(outcome)
                 if field.name != 'gradient'}
          for name, outcome in comparison.outcomes.items()}
  return {'where': comparison.where, 'tokens': comparison.tokens, 'rows': rows,
          'cosines': replay_rows.cosines(
              list(comparison.outcomes.values())).tolist()}


def _section(comparison):
  numbers = _numbers(comparison)
  head = ['row', 'loss', 'gradient norm', 'clip %', 'in M %',
          'ΔH predicted, mnat', 'ΔH measured, mnat']
  rows = [[name, f'{row["loss"]:.5f}', f'{row["grad_norm"]:.4f}',
           f'{100 * row["clip_fraction"]:.2f}',
           f'{100 * row["region_share"]:.2f}',
           f'{1e3 * row["entropy_predicted"]:.4f}',
           f'{1e3 * row["entropy_measured"]:.4f}']
          for name, row in numbers['rows'].items()]
  return (
      f'<h3>{page.text(comparison.where)}</h3>'
      f'<p class="caption">{comparison.tokens} tokens, the same for every row. '
      'ΔH: change of their mean entropy by one step of the optimiser, '
      'predicted to first order and measured.</p>'
      + page.table(head, rows, range(1, len(head)))
      + '<p>Cosine between the rows\' gradients:</p>'
      + page.heat_map(list(numbers['rows']), numbers['cosines']))


def _file_name(run):
  return run.name.replace('/', '_')
