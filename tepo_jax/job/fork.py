"""A fork: a run that begins from a checkpoint of another run, its parent.

`train --workdir=NEW --from=OLD[@STEP]` begins NEW with the weights, the
optimiser's state and the position in the data that OLD had after rollout step
STEP, and counts its steps from there. Any field may differ from OLD's if the
checkpoint's arrays fit. NEW/parent.json names the parent. NEW's first
checkpoint is a copy of the parent's, so it does not need OLD again.
"""

import contextlib
import dataclasses
import json
import shutil
from typing import Any

import ml_collections

from configs import fields as fields_lib
from tepo_jax import errors
from tepo_jax.job import carrying
from tepo_jax.job import configuration
from tepo_jax.job import learner as learner_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.learning import update
from tepo_jax.policy.huggingface import tensor_files
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import files
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import processes

FILE = 'parent.json'


@dataclasses.dataclass(frozen=True)
class Parent:
  """Where a run was forked.

  run: the parent's workdir. step: the rollout step whose checkpoint was taken.
  keeps_optimizer: whether the moments are the parent's. config: a digest of the
  parent's fields without the seed and those that change no result, the same for
  parents of one group of seeds.
  """
  run: str
  step: int
  keeps_optimizer: bool
  config: str

  def __str__(self) -> str:
    return f'a fork of {self.run} after step {self.step}'


def read(workdir: files.Path) -> Parent | None:
  """The parent of the run in a folder; None if it has none.

  Raises:
    errors.InputError: its parent.json is damaged.
  """
  path = workdir / FILE
  if not path.is_file():
    return None
  try:
    return Parent(**tensor_files.read_json(path))
  except TypeError as error:
    raise errors.InputError(f'{path}: {errors.one_line(error)}') from error


def write(parent: Parent, workdir: files.Path) -> None:
  """Records the parent of the run in a folder."""
  files.replace_text(workdir / FILE, json.dumps(
      dataclasses.asdict(parent), indent=2, sort_keys=True) + '\n')


def choose(config: ml_collections.ConfigDict, workdir: files.Path,
           origin: str | None, keeps_optimizer: bool) -> Parent | None:
  """The parent of the run that `workdir` is or will be; None without one.

  origin: the flag --from, OLD[@STEP]; a run that is resumed needs it no more.
  A fork that was stopped before its first checkpoint is checked as a new one,
  as its config may have changed. All processes of a job must call this.

  Raises:
    errors.InputError: the folder holds another run than this fork, or OLD has
      no such checkpoint, or another model.
  """
  if origin is None and not keeps_optimizer:
    raise errors.InputError('--new_optimizer needs --from')
  saved = read(workdir)
  if origin is None and saved is None:
    return None
  is_begun = not run_folder.is_untrained(workdir)
  if origin is not None:
    where, (name, step) = f'--from={origin}', run_folder.split_step(origin)
    old = files.path(name).resolve()
    if is_begun:
      _check_same(saved, old, step, keeps_optimizer,
                  f'{where}: --workdir={workdir}')
  if is_begun:
    return saved
  if origin is None:
    where, old, step = f'{workdir}/{FILE}', files.path(saved.run), saved.step
    keeps_optimizer = saved.keeps_optimizer
  parents = run_folder.read_config(old)
  configuration.check_saved(parents, f'{old}/config.json')
  _check_model(config, parents, where)
  return Parent(str(old), _found_step(config, old, where, step),
                keeps_optimizer, _digest(parents))


def _check_same(saved, old, step, keeps_optimizer, where):
  """Refuses a run that is not the fork that --from and its flag name."""
  if saved is None or (saved.run, saved.keeps_optimizer) != (
      str(old), keeps_optimizer) or step not in (None, saved.step):
    was = 'without --from' if saved is None else (
        f'from {saved.run}@{saved.step}'
        f'{"" if saved.keeps_optimizer else " with --new_optimizer"}')
    raise errors.InputError(
        f'{where} is a run that began {was}; choose another folder')


def _check_model(config, parents, where):
  """What a fork must have in common with its parent; the files of models that
  are not embedded are compared later."""
  mine, theirs = fields_lib.flat(config), fields_lib.flat(parents)
  differing = [name for name in sorted(mine.keys() | theirs.keys())
               if name.startswith('pretrain.')
               and mine.get(name) != theirs.get(name)]
  if (config.model is None) != (parents.model is None):
    differing = ['model']
  elif config.model is not None:
    differing = []
  # The policy is base + alpha / rank A B, in the layers that targets names.
  differing += [f'lora.{name}' for name in (
      ('rank', 'alpha', 'targets') if config.lora.rank else ('rank',))
                if config.lora[name] != parents.lora[name]]
  if differing:
    raise errors.InputError(
        f'{where}: a fork trains its parent\'s weights, but in '
        f'{errors.listed([f"config.{name}" for name in differing])} they '
        'differ')


def _found_step(config, old, where, step):
  saved = checkpoint.steps(old / session_lib.CHECKPOINTS)
  latest = processes.of_first(max(saved, default=0))
  step = latest if step is None else step
  if not step or processes.any_of(step not in saved):
    raise errors.InputError(
        f'{where}: {old} has no such checkpoint (it has: {saved})')
  if step >= config.steps:
    raise errors.InputError(
        f'{where}: step {step} is done, so that config.steps='
        f'{config.steps} leaves nothing to do; the fork counts on from there')
  return step


def _digest(config):
  return run_folder.digest_of({
      name: value for name, value in fields_lib.flat(config).items()
      if not configuration.may_differ_between_seeds(name)})


def copy_model(parent: Parent, folder: files.Path) -> None:
  """Copies the embedded model that the parent has made to `folder`."""
  with (files.downloaded(files.path(parent.run) / session_lib.BASE_MODEL)
        as source, weights.atomic_folder(folder) as partial):
    shutil.copytree(source, partial, dirs_exist_ok=True)


def restore(parent: Parent, learner: learner_lib.Learner
            ) -> tuple[int, update.TrainState, dict[str, Any]]:
  """(step, state, extra) of the parent's checkpoint, as of a run's own.

  The position in the data is the parent's if the data is, and the numbers of
  steps left out and of updates skipped in a row if all that decides them is.
  Completions in flight are continued if the data, `rollout` and the grader are
  the parent's, and their groups begun anew if only the data is. A reference
  policy that the parent does not have is the policy at the fork. Records of the
  step that the parent has yet to write stay the parent's.

  Raises:
    errors.InputError: the checkpoint is gone, or is of another model folder or
      other arrays.
  """
  run, programs = files.path(parent.run), learner.programs
  parents = run_folder.read_config(run)
  saved, unpadded = _saved_by(parents, programs)
  wanted = programs_lib.abstract_state(programs).replace(
      reference=saved.reference)
  if not parent.keeps_optimizer:  # its moments may be of another dtype
    wanted = wanted.replace(opt_state=saved.opt_state)
  with contextlib.closing(checkpoint.Checkpointer(
      run / session_lib.CHECKPOINTS, read_only=True)) as checkpointer:
    state, extra = checkpointer.restore(
        parent.step, wanted, unpadded, learner.check_stands_on)
  theirs, state = state.reference, state.replace(reference=None)
  if not parent.keeps_optimizer:
    params, state = state.params, None  # frees the moments first
    state = programs.init_state(params).replace(reference=None)
  state = state.replace(reference=_reference(
      programs, state.params, theirs, parents.compute.dtype))
  extra = carrying.forked(
      extra, continues(learner.config, parents),
      fits=_is_same(learner.config, parents, 'compute', 'lora'))
  return parent.step, state, extra | {
      'unrecorded': None,
      'began': {'step': parent.step,
                'updates': int(mesh_lib.to_host(state.step))},
      'cursor': extra['cursor'] * _is_same(learner.config, parents, 'data'),
      'left_out_in_a_row': extra['left_out_in_a_row'] * _is_same(
          learner.config, parents, 'data', 'method', 'reward', 'rollout'),
      'skipped_in_a_row': extra['skipped_in_a_row'] * (
          parent.keeps_optimizer and _is_same(
              learner.config, parents, 'data', 'method', 'reward', 'rollout',
              'optimizer', 'train', 'compute', 'lora'))}


def continues(config: ml_collections.ConfigDict,
              parents: ml_collections.ConfigDict) -> bool:
  """Whether a fork continues completions in flight: it samples as its parent
  does, and its grader would have given the same verdicts."""
  return _is_same(config, parents, 'data', 'rollout') and (
      config.grading.verifier == parents.grading.verifier
      and config.grading.timeout == parents.grading.timeout)


def _saved_by(parents, programs):
  """What the parent's checkpoints hold, as of `programs_lib.restorable`, on
  this run's devices."""
  parents = ml_collections.ConfigDict(parents.to_dict())
  parents.rollout.tensor = None
  return programs_lib.restorable(programs_lib.make(
      parents, dataclasses.replace(programs.model, dtype=parents.compute.dtype),
      programs.mesh))


def _reference(programs, params, theirs, dtype):
  """This run's reference policy; `theirs` is the parent's, in its dtype."""
  if not programs.policy_loss.needs_reference:
    return None
  if theirs is None:
    return programs.to_old_policy(params)
  return theirs if dtype == programs.model.dtype else (
      programs.to_old_policy(theirs))


def _is_same(config, parents, *sections):
  """Whether the seed and all fields of the sections are the parent's."""
  mine, theirs = ({
      name: value for name, value in fields_lib.flat(each).items()
      if name == 'seed' or name.partition('.')[0] in sections}
                  for each in (config, parents))
  return mine == theirs
