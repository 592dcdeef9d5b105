"""Report sections that need a run's model: token inspector and replay.

`--inspect` and `--replay` replay a rollout step of each run (see `replay`);
this module writes the results as files and formats them for the page.
"""

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
    firsts = [group.runs[0] for group in runs_lib.group(runs)]
    return _each(firsts, _last_rollout)
  return _of_step(runs, lambda run: _inspect(run, step, out))


def replays(runs: Sequence[runs_lib.Run], step: int | None, out: pathlib.Path,
            methods: Callable[[float], Mapping[str, Any]]
            ) -> list[tuple[str, str]]:
  """Returns report sections; writes DIR/replay_RUN_STEP.json and heat maps.

  `methods` maps TEPO's KL coefficient to the paper's methods.
  """
  if step is None:
    return []
  return _of_step(runs, lambda run: _replay(run, step, out, methods))


def _each(runs, function):
  """Returns results by run, without None; errors are printed to stderr."""
  found = []
  for run in runs:
    try:
      found.append(function(run))
    except errors.InputError as error:
      print(f'{run.name}: {error}', file=sys.stderr)
  return [item for item in found if item is not None]


def _of_step(runs, function):
  found = _each(runs, function)
  if not found:
    raise errors.InputError('no run of --runs has that step, see above')
  return found


def _last_rollout(run):
  steps = dump.steps(run.path / session_lib.ROLLOUTS)
  if not steps or run.fields is None:
    return None
  records = dump.read(run.path / session_lib.ROLLOUTS, steps[-1])
  config = run_folder.read_config(run.path)
  tokenizer = weights.load_tokenizer(
      session_lib.model_folder(config, run.path))
  surprise_BT = np.zeros(
      (len(records), max(r['tokens'] for r in records)), np.float32)
  for surprise_T, record in zip(surprise_BT, records):
    surprise_T[:record['tokens']] = -np.float32(record['sampler_logp'])
  return inspector.payload(
      records, _decoder(tokenizer), {'surprise': surprise_BT},
      title=f'{run.name}, step {steps[-1]}',
      about='From the saved rollout only; --inspect shows more values.')


def _decoder(tokenizer):
  return lambda token: tokenizer.decode([token])


def _inspect(run, step, out):
  with replay.open_step(run.path, step) as opened:
    config = opened.learner.config
    records = dump.read(run.path / session_lib.ROLLOUTS, step)
    opened.finish()
    view = opened.view(_with_region(config.method))
    arrays = inspector.values(view.batch, view.logp_BT, view.entropy_BT,
                              view.kl_BT, view.selection)
    decode = _decoder(opened.learner.session.tokenizer)
  path = out / f'inspect_{_file_name(run)}_{step}.jsonl'
  with path.open('w', encoding='utf-8') as file:
    for index, record in enumerate(records):
      file.write(json.dumps({name: record[name] for name in (
          'cursor', 'sample', 'token_ids')} | {
              key: inspector.exact(value_BT[index, :record['tokens']])
              for key, value_BT in arrays.items()}) + '\n')
  return inspector.payload(
      records, decode, arrays, title=f'{run.name}, step {step}',
      about=_about(config.method, step))


def _with_region(method):
  """Returns the method, with TEPO's region to show if it has none."""
  method = method.to_dict()
  if method['reg']['region'] == 'none':
    method['reg'] |= dict(region='positive_falling', coef=0.0)
  return method


def _about(method, step):
  name = method.reg.region
  region = (f'the method\'s region, {name}' if name != 'none' else
            'TEPO\'s region (A > 0, ΔH < 0), which this run does not use')
  return (f'"Before" is the policy that sampled step {step}; "after" is after '
          f'all of the step\'s updates. M is {region}.')


def _replay(run, step, out, methods):
  with replay.open_step(run.path, step) as opened:
    method = opened.learner.config.method
    chosen = dict(methods(_beta(method)))
    if method.to_dict() not in [
        ml_collections.ConfigDict(row).to_dict() for row in chosen.values()]:
      chosen['this run'] = method
    comparisons = opened.compare(chosen)
  name = f'replay_{_file_name(run)}_{step}'
  (out / f'{name}.json').write_text(json.dumps({
      'run': run.name, 'step': step,
      'comparisons': list(map(_numbers, comparisons))}, indent=1) + '\n')
  for index, item in enumerate(comparisons):
    figures.draw_heat_map(
        list(item.outcomes),
        replay.cosines(list(item.outcomes.values())),
        f'{run.name}, step {step}, {item.where}', out / f'{name}_{index}')
  return (f'Replay: {run.name}, step {step}',
          ''.join(map(_section, comparisons)))


def _beta(method):
  is_tepo = method.reg.penalty == 'kl_full' and method.reg.coef > 0
  return method.reg.coef if is_tepo else _BETA


def _numbers(comparison):
  rows = {name: {field.name: getattr(outcome, field.name)
                 for field in dataclasses.fields(outcome)
                 if field.name != 'gradient'}
          for name, outcome in comparison.outcomes.items()}
  return {'where': comparison.where, 'tokens': comparison.tokens, 'rows': rows,
          'cosines': replay.cosines(
              list(comparison.outcomes.values())).tolist()}


def _section(comparison):
  numbers = _numbers(comparison)
  head = ['method', 'loss', 'gradient norm', 'clip %', 'in M %',
          'ΔH predicted, mnat', 'ΔH measured, mnat']
  rows = [[name, f'{outcome["loss"]:.5f}', f'{outcome["grad_norm"]:.4f}',
           f'{100 * outcome["clip_fraction"]:.2f}',
           f'{100 * outcome["region_share"]:.2f}',
           f'{1e3 * outcome["entropy_predicted"]:.4f}',
           f'{1e3 * outcome["entropy_measured"]:.4f}']
          for name, outcome in numbers['rows'].items()]
  return (
      f'<h3>{page.text(comparison.where)}</h3>'
      f'<p class="caption">{comparison.tokens} tokens, the same for every '
      'method. ΔH: change of their mean entropy by one optimiser update, '
      'predicted to first order and measured.</p>'
      + page.table(head, rows, range(1, len(head)))
      + '<p>Cosines between the methods\' gradients:</p>'
      + page.heat_map(list(numbers['rows']), numbers['cosines']))


def _file_name(run):
  return run.name.replace('/', '_')
