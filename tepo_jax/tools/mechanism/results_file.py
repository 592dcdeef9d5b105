"""The measurement's file of results: whose it is, and what it has so far."""

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
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.tools.mechanism import directions
from tepo_jax.tools.mechanism import observe

NAME = 'mechanism.json'
_LOCAL = ('model', 'compute.cache', 'grading.workers')


def saved_date(out: files.Path) -> str | None:
  """data.date of the measurement that a folder holds, if it does."""
  path = out / NAME
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
  path = out / NAME
  if not path.exists():
    run_folder.check_free(out)
  lock.acquire()
  if not path.exists():
    write(dict(setup=wanted, levels={}), out)
  with _reading(path):
    saved = json.loads(path.read_text('utf-8'))
    differing = [x for x in wanted if saved['setup'][x] != wanted[x]]
  if differing:
    raise errors.InputError(f'--out={out} holds another measurement: '
                            f'{", ".join(differing)} differ')
  return saved


def setup(lab: observe.Lab, minibatches: int) -> dict[str, Any]:
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
      parameters=lab.session.parameters(), samples=config.rollout.samples,
      minibatches=minibatches, beta=directions.BETA,
      longest=config.optimizer.max_grad_norm, versions={
          name: importlib.metadata.version(name)
          for name in ('jax', 'jaxlib', 'numpy')})))


def write(results: dict[str, Any], out: files.Path) -> None:
  """Writes the results so far, measured numbers with six digits."""
  rounded = json.loads(json.dumps(results['levels'], allow_nan=False),
                       parse_float=lambda text: float(f'{float(text):.6g}'))
  files.replace_text(out / NAME, json.dumps(
      results | dict(levels=rounded), ensure_ascii=False) + '\n')
