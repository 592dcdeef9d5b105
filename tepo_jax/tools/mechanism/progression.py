"""The measurement, policy by policy: its file of results, and its resuming."""

import contextlib
import hashlib
import importlib.metadata
import json
from typing import Any

from configs import base
from configs import fields as fields_lib
from configs import tiny
from tepo_jax import errors
from tepo_jax.job import provenance
from tepo_jax.job import run_folder
from tepo_jax.runtime import files
from tepo_jax.runtime import host
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.runtime import progress as progress_lib
from tepo_jax.tools.mechanism import measure
from tepo_jax.tools.mechanism import observe

RESULTS = 'mechanism.json'
_METRICS = ('clip_fraction_low', 'clip_fraction_high', 'region_share',
            'skipped')  # of the updates so far
_LOCAL = ('model', 'compute.cache', 'grading.workers')


def run(lab: observe.Lab, results: dict[str, Any], out: files.Path) -> None:
  """Measures what `results` lacks; writes them after each policy."""
  config, levels = lab.config, results['levels']
  samples = config.rollout.samples
  methods = measure.rows(config.method_name, config.method)
  progress = progress_lib.Progress(1 + len(methods) * len(measure.COUNTS))

  def level(count, params):
    groups, tokens = lab.sample(params, 1), held_out.tokens(params)
    progress.phase(f'{count} updates: a gradient for each prompt')
    levels[str(count)] = dict(
        fresh=measure.own_samples(groups),
        tokens=measure.drift(tokens, samples), gradients=measure.gradients(
            lab, params, held_out.batch, tokens, lab.batch(groups)))
    return levels[str(count)]['fresh']

  with (contextlib.closing(progress),
        host.compilations_shown(
            config.model, progress.compiling, progress.compiled)):
    progress.begin(number := 1)
    progress.phase('sampling from the model')
    held_out = observe.Observed(lab, lab.sample(lab.start, 0))
    trained = observe.Observed(lab, rollout := lab.rollout())
    if '0' not in levels:
      level(0, lab.start)
    write(results, out)
    progress.step(number, '')
    for name, method in methods.items():
      rows = results['methods'].setdefault(name, {})
      if len(rows) == len(measure.COUNTS):
        number += len(rows)
        continue
      for count, params, metrics in lab.updates(
          method, rollout, measure.COUNTS):
        progress.begin(number := number + 1)
        progress.phase(f'{name}: {count} updates')
        if str(count) not in rows:
          rows[str(count)] = dict(
              fresh=level(count, params) if name == config.method_name
              else measure.own_samples(lab.sample(params, 1)),
              updates={x: float(metrics[x]) for x in _METRICS},
              **measure.drift(trained.tokens(params), samples))
          write(results, out)
        progress.step(number, '')


def saved_date(out: files.Path) -> str | None:
  """data.date of the measurement that a folder holds, if it does."""
  path = out / RESULTS
  if not path.exists():
    return None
  with _reading(path):
    fields = json.loads(path.read_text('utf-8'))['setup']['config']
    return fields['data.date'] if 'data.date' in fields else None


@contextlib.contextmanager
def _reading(path):
  """Refuses a file that is not one of results."""
  try:
    yield
  except (KeyError, TypeError, ValueError) as error:
    raise errors.InputError(f'{path}: {errors.one_line(error)}') from error


def start(out: files.Path, lock: lock_lib.FolderLock, wanted: dict[str, Any]
          ) -> dict[str, Any]:
  """Claims the folder; returns the results so far of the same `setup`, or
  refuses it: it holds another measurement, or other files."""
  path = out / RESULTS
  if not path.exists():
    run_folder.check_free(out)
  lock.acquire()
  if not path.exists():
    write(dict(setup=wanted, levels={}, methods={}), out)
  with _reading(path):
    saved = json.loads(path.read_text('utf-8'))
    differing = [x for x in wanted if saved['setup'][x] != wanted[x]]
  if differing:
    raise errors.InputError(f'--out={out} holds another measurement: '
                            f'{", ".join(differing)} differ')
  return saved


def setup(lab: observe.Lab) -> dict[str, Any]:
  """What determines the results; of a model its digest, not its folder."""
  config = lab.config
  defaults = fields_lib.flat(base.get_config(config.method_name)) | (
      fields_lib.flat({'pretrain': fields_lib.config(tiny.PRETRAIN)}))
  digests = provenance.weight_digests(
      lab.learner.programs.model, lab.session.load_params())
  return json.loads(json.dumps(dict(
      method=config.method_name, seed=config.seed,
      config={name: value for name, value in fields_lib.flat(
          config).items() if name not in _LOCAL and value != defaults[name]},
      model=hashlib.sha256(
          json.dumps(digests, sort_keys=True).encode()).hexdigest(),
      parameters=lab.session.parameters(), prompts=len(lab.prompts),
      samples=config.rollout.samples, versions={
          name: importlib.metadata.version(name)
          for name in ('jax', 'jaxlib', 'numpy')})))


def write(results: dict[str, Any], out: files.Path) -> None:
  """Writes the results so far, numbers with six digits."""
  rounded = json.loads(json.dumps(results, allow_nan=False),
                       parse_float=lambda text: float(f'{float(text):.6g}'))
  files.replace_text(
      out / RESULTS, json.dumps(rounded, ensure_ascii=False) + '\n')
