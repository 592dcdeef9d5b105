r"""Measures gradient estimators off policy, TEPO's mask, and its KL penalty.

  python -m tepo_jax.mechanism --config=configs/countdown.py:grpo \
      --config.model=FOLDER --out=DIR

For small models: it holds one gradient per prompt. The policies are the model,
θ_0, and what 8, 16 and 32 updates on one rollout make of it: by the config's
method, by sequence weights with two bounds, and by TEPO with growing β. At the
config's method's policies, on samples of θ_0 that are therefore old, it measures
the variance of each estimator's gradient and its direction and length against
the gradient on fresh samples; also the tokens in the mask M, and the entropy
change that the paper's equations predict.

Prompts are those of the first of config.eval.sets, config.rollout.samples
completions each. Writes mechanism.json and the tables made from it,
mechanism.md; if it is killed, the same command resumes after the last policy
that is complete.
"""

import hashlib
import importlib.metadata
import json
import pathlib
import platform
from typing import Any

from absl import flags
import jax

from configs import base
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import checks
from tepo_jax.job import provenance
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.job import sizes
from tepo_jax.runtime import files
from tepo_jax.runtime import host
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.runtime import progress as progress_lib
from tepo_jax.tools.mechanism import measure
from tepo_jax.tools.mechanism import observe
from tepo_jax.tools.mechanism import tables

RESULTS, TABLES = 'mechanism.json', 'mechanism.md'
_HERE = ('model', 'compute.cache', 'grading.workers')  # differ by machine

_CONFIG = cli.DEFINE_config()
_OUT = flags.DEFINE_string(
    'out', None, 'Folder for mechanism.json and mechanism.md, new or of the '
    'same measurement.', required=True)


def main() -> None:
  config, out = _CONFIG.value, pathlib.Path(_OUT.value)
  with config.unlocked():
    # One rollout for all updates.
    config.rollout.prompts = -(-max(measure.COUNTS) // config.train.epochs) * (
        config.train.minibatch_prompts)
  checks.check(config, cli.overridden())
  sizes.check(config)
  if config.model is None:
    raise errors.InputError('config.model is not set: give a model folder, '
                            'such as tepo_jax.pretrain makes')
  with (lock_lib.FolderLock(out) as lock, session_lib.open_folder(
      config, session_lib.model_folder(config, out)) as session):
    lab = observe.Lab(config, session)
    results = _start(out, lock, _setup(lab))
    _write(out, results)
    session_lib.cache_compilations(config, out)
    run(lab, results, out)
  files.replace_text(out / TABLES, tables.markdown(results))
  print(f'wrote {out / RESULTS} and {TABLES}')


def run(lab: observe.Lab, results: dict[str, Any], out: pathlib.Path) -> None:
  """Measures what `results` lacks; writes them after each policy."""
  config = lab.config
  methods = measure.rows(config.method_name, config.method)
  names = [(name, count) for name in methods for count in measure.COUNTS]
  progress = progress_lib.Progress(1 + len(names))

  def finish(done):
    _write(out, results)
    progress.step(done, '')

  with host.compilations_shown(progress.compiling, progress.compiled):
    progress.begin(1)
    progress.phase('sampling from the model')
    held_out = observe.Observed(lab, lab.sample(lab.start, 0))
    rollout = lab.rollout()
    trained = observe.Observed(lab, rollout)
    if '0' not in results['levels']:
      _level(lab, results, 0, held_out, lab.start, progress)
    finish(1)
    for name, method in methods.items():
      rows = results['methods'].setdefault(name, {})
      if all(str(count) in rows for count in measure.COUNTS):
        continue
      for count, params, metrics in lab.updates(
          method, rollout, measure.COUNTS):
        number = 2 + names.index((name, count))
        progress.begin(number)
        progress.phase(f'{name}: {count} updates')
        if str(count) in rows:
          continue
        if name == config.method_name:
          fresh = _level(lab, results, count, held_out, params, progress)
        else:
          fresh = measure.own_samples(lab.sample(params, 1))
        rows[str(count)] = dict(
            measure.drift(lab, trained, params), fresh=fresh,
            updates=measure.of_updates(metrics))
        finish(number)


def _level(lab, results, count, held_out, params, progress):
  """Adds the measurements at one policy; returns those of its samples."""
  groups = lab.sample(params, 1)
  progress.phase(f'{count} updates: a gradient for each prompt')
  fresh = measure.own_samples(groups)
  results['levels'][str(count)] = dict(
      fresh=fresh, tokens=measure.drift(lab, held_out, params),
      gradients=measure.gradients(lab, held_out, params, groups))
  return fresh


def _start(out, lock, setup):
  """The results so far of the same measurement, or none; makes the folder."""
  path = out / RESULTS
  if not path.exists():
    run_folder.check_out(out)
    lock.acquire()
    return dict(setup=setup, levels={}, methods={})
  lock.acquire()
  try:
    saved = json.loads(path.read_text('utf-8'))
    differing = [name for name in setup
                 if name != 'versions' and saved['setup'][name] != setup[name]]
  except (KeyError, TypeError, ValueError) as error:
    raise errors.InputError(f'{path}: {errors.one_line(error)}') from error
  if differing:
    raise errors.InputError(f'--out={out} holds another measurement: '
                            f'{", ".join(differing)} differ')
  return saved


def _setup(lab):
  """What determines the results; of a model its digest, not its folder."""
  config, model = lab.config, lab.learner.programs.model
  fields = run_folder.field_names(config)
  defaults = run_folder.field_names(base.get_config(config.method_name))
  digests = provenance.weight_digests(model, lab.session.load_params())
  return json.loads(json.dumps(dict(
      method=config.method_name, seed=config.seed,
      config={name: value for name, value in fields.items()
              if name not in _HERE and value != defaults[name]},
      model=hashlib.sha256(
          json.dumps(digests, sort_keys=True).encode()).hexdigest(),
      parameters=lab.session.parameters(), prompts=len(lab.prompts),
      samples=config.rollout.samples, device=jax.devices()[0].device_kind,
      versions={'python': platform.python_version()} | {
          name: importlib.metadata.version(name)
          for name in ('jax', 'jaxlib', 'numpy')})))


def _write(out, results):
  rounded = jax.tree.map(
      lambda x: float(f'{x:.6g}') if isinstance(x, float) else x, results)
  files.replace_text(out / RESULTS, json.dumps(
      rounded, indent=1, allow_nan=False, ensure_ascii=False) + '\n')


if __name__ == '__main__':
  cli.run(main)
