"""Does a run fit on its devices?

Adds up the arrays that stay on a device, and chooses what an update recomputes
by asking the compiler how much memory each choice takes. Decoding: see `slots`.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import math
from typing import NamedTuple

import jax
import ml_collections

from tepo_jax import errors
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import slots as slots_lib
from tepo_jax.policy import remat as remat_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.runtime import disk
from tepo_jax.runtime import host
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import processes

# The share, of what the arrays leave free, for hidden states of π_old beyond
# those of one minibatch. An update needs the rest.
_STATES_SHARE = 0.2
# The share of a machine's memory that an update with remat='auto' may take on
# CPUs: other programs need memory too.
_CPU_SHARE = 0.5
_MAX_MESSAGE = 200  # characters of XLA's message, which may list every buffer


def check(programs: programs_lib.TrainingPrograms) -> None:
  """Refuses a mesh whose devices cannot hold the arrays of `held`.

  Raises:
    errors.InputError: with the bytes of each part on a device.
  """
  limit, sizes = _limit(programs), held(programs)
  if sum(sizes.values()) > limit:
    raise errors.InputError(
        f'mesh {dict(programs.mesh.shape)}: a device has {limit / 1e9:.4g} GB '
        f'of memory and would have to hold {sum(sizes.values()) / 1e9:.4g} '
        f'GB: {_in_gigabytes(sizes)}')


def fitted(config: ml_collections.ConfigDict,
           programs: programs_lib.TrainingPrograms,
           size_of: Callable[[programs_lib.TrainingPrograms], float], *,
           limit: float | None = None, begin: str | None = None
           ) -> tuple[programs_lib.TrainingPrograms, float | None]:
  """For compute.remat='auto', the programs that recompute the least of those
  whose update fits a device ('full' in any case), and that update's bytes.

  The compiler decides: of remat.POLICIES from `begin` on, each with more to
  recompute than the one before, it takes the first that fits.

  Args:
    size_of: programs -> bytes of a device during an update; math.inf if the
      compiler refuses it. A run passes `update_bytes`, a plan its estimate.
    limit: bytes of a device; None: of `_limit`, and on CPUs _CPU_SHARE of it.
    begin: the choice of the run that resumes; None: estimated, as a large
      update compiles for minutes.
  """
  if config.compute.remat != 'auto':
    return programs, None
  is_cpu = mesh_lib.platform(programs.mesh) == 'cpu'
  limit = limit or _limit(programs) * (_CPU_SHARE if is_cpu else 1)
  # Elsewhere a kernel that needs the results of elementwise operations computes
  # them itself, faster than it could read them.
  names = list(remat_lib.POLICIES)
  begin = begin or _estimated(programs, names[not is_cpu:], limit)
  for name in names[names.index(begin):]:
    chosen = dataclasses.replace(programs_lib.make(
        config, dataclasses.replace(programs.model, remat=name),
        programs.mesh), old_states=programs.old_states)
    size = size_of(chosen)
    if not processes.any_of(size > limit):
      break
  return chosen, size


def _estimated(programs, names, limit):
  """The first policy whose layers' results fit next to the arrays that stay, an
  update's other temporaries left out: a lower bound."""
  model, (_, rows, columns) = (
      programs.model, programs.minibatch.rows.token_RS.shape)
  tokens = rows * columns / mesh_lib.batch_shards(programs.mesh)
  sizes = held(programs)
  free = limit - sum(sizes.values()) + sizes['weights for decoding']
  return next((name for name in names if tokens * remat_lib.bytes_a_token(
      model, name, programs.mesh.shape['tensor']) <= free), 'full')


def update_bytes(config: ml_collections.ConfigDict,
                 programs: programs_lib.TrainingPrograms) -> float:
  """Bytes of a device during an update, the epoch's other minibatches included;
  math.inf if XLA refuses the program and another recomputes more.

  It compiles the program for a run's arguments, and jax keeps it: the run's
  first update does not compile it again.
  """
  arguments = programs_lib.update_arguments(programs)
  try:
    compiled = programs.train_step.lower(*arguments.in_order()).compile()
  except jax.errors.JaxRuntimeError as error:
    if ('RESOURCE_EXHAUSTED' not in str(error)
        or programs.model.remat == 'full'):
      raise
    return math.inf
  others = config.rollout.prompts // config.train.minibatch_prompts - 1
  return (sum(program_bytes(compiled, mesh_lib.platform(programs.mesh)))
          + others * mesh_lib.device_bytes(arguments.minibatch))


class ProgramBytes(NamedTuple):
  """Bytes of a device that a compiled program takes.

  outputs: those that are not also arguments. temporaries: what it needs besides
  while it runs. code: of its instructions.
  """
  arguments: int
  outputs: int
  temporaries: int
  code: int


def program_bytes(compiled: jax.stages.Compiled, platform: str) -> ProgramBytes:
  """What XLA says that a program takes.

  On a TPU both of XLA's counts of temporaries may be too high, so the smaller
  one counts. `temp_size` includes what is never alive at the same time, for an
  update of Qwen2.5-7B on v6e:4x4 5.6 GiB; the peak, by which XLA refuses an
  update (tests/job/test_memory.py), may include buffers in VMEM, as XLA's
  dumped buffer assignment of a small decode step shows. A program that was read
  from a cache may state no peak.
  """
  found = compiled.memory_analysis()
  arguments = found.argument_size_in_bytes
  outputs = found.output_size_in_bytes - found.alias_size_in_bytes
  temporaries = found.temp_size_in_bytes
  if platform == 'tpu' and found.peak_memory_in_bytes:
    alive = found.peak_memory_in_bytes - arguments - outputs
    temporaries = max(0, min(temporaries, alive))
  return ProgramBytes(arguments, outputs, temporaries,
                      found.generated_code_size_in_bytes)


def describe_remat(remat: str, size: float) -> str:
  """What `fitted` has chosen."""
  return (f'compute.remat=auto: {remat}; an update takes {size / 1e9:.3g} GB '
          'of each device')


def keeping(programs: programs_lib.TrainingPrograms, minibatches: int,
            limit: int | None = None) -> programs_lib.TrainingPrograms:
  """The programs with `old_states` enlarged from one minibatch to all of an
  epoch, or to as many of their microbatches as fit; `limit` as in `fitted`."""
  states = programs.old_states
  if states is None:
    return programs
  rows, least, *rest = states.shape
  free = (limit or _limit(programs)) - sum(held(programs).values())
  more = int(_STATES_SHARE * free * least // mesh_lib.device_bytes(states))
  count = min(least * minibatches, least + max(0, more))
  return dataclasses.replace(
      programs, old_states=states.update(shape=(rows, count, *rest)))


def describe_old_states(states: jax.ShapeDtypeStruct) -> str:
  """What becomes of π_old's hidden states; `states`: programs.old_states."""
  rows, count, columns, _ = states.shape
  return (f'exact KL: π_old\'s hidden states of up to {count} microbatches of '
          f'{rows} × {columns:,} tokens are kept after scoring, '
          f'{mesh_lib.device_bytes(states) / 1e9:.3g} GB on each device; in a '
          'step with more, they are computed again before each update')


def held(programs: programs_lib.TrainingPrograms) -> dict[str, int]:
  """Bytes on one device of the arrays that outlive a jitted call."""
  model = programs.model

  def placed(rules, model, mesh):
    return jax.tree.map(
        lambda x, s: x.update(sharding=s),
        transformer.abstract_params(model, model.dtype), mesh_lib.shardings(
            mesh, transformer.logical_axes(model), rules))

  state = programs_lib.abstract_state(programs)
  frozen, _ = programs_lib.split_trained(
      model, placed(mesh_lib.RULES, model, programs.mesh))
  return {name: mesh_lib.device_bytes(tree) for name, tree in {
      'weights and moments': state.replace(reference=None),
      'gradient': state.params, 'reference policy': state.reference,
      'frozen weights': frozen,
      'weights for decoding': placed(
          mesh_lib.DECODE_RULES, *programs.decoding),
      'hidden states of π_old': programs.old_states,
  }.items()}


def check_cache(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
                shapes: shapes_lib.Shapes) -> None:
  """On CPUs, whose free memory `sampling_shapes` cannot see, refuses a cache
  that is larger than the machine's memory.

  Raises:
    errors.InputError: with the sizes.
  """
  size = slots_lib.cache_bytes(model, mesh, shapes)
  if mesh_lib.memory_limit(mesh) is None and size > _cpu_bytes():
    raise errors.InputError(
        f'the cache of {shapes.slots[-1]} completions of up to '
        f'{shapes.columns[-1]} tokens takes {size / 2**30:,.3g} GiB on each '
        f'device, of which each has {_cpu_bytes() / 2**30:.3g} GiB: lower '
        'config.rollout.slots, config.rollout.chunk or the lengths')


def _limit(programs):
  """Bytes of a device: the least that one of the job reports, or for a CPU,
  which reports nothing, its part of the machine's memory. All processes of a
  job must call it."""
  return processes.least(
      mesh_lib.memory_limit(programs.mesh) or int(_cpu_bytes()))


def _cpu_bytes():
  """A CPU device's part of the machine's memory."""
  return host.memory_bytes() / len(jax.local_devices())


@contextlib.contextmanager
def explaining_exhaustion(
    config: ml_collections.ConfigDict,
    programs: programs_lib.TrainingPrograms) -> Iterator[None]:
  """Adds what a device holds to XLA's out-of-memory errors.

  jax passes some of them on as other exceptions than its own: any counts.
  """
  try:
    yield
  except Exception as error:  # pylint: disable=broad-exception-caught
    if 'RESOURCE_EXHAUSTED' not in str(error) or (
        disk.failure(error) is not None):
      raise
    raise jax.errors.JaxRuntimeError(
        f'{errors.one_line(error)[:_MAX_MESSAGE]}; '
        f'{_describe_held(config, programs)}') from error


def _describe_held(config, programs):
  slot = slots_lib.slot_bytes(
      *programs.decoding,
      config.data.max_prompt_tokens + config.rollout.max_tokens)
  completions = config.rollout.prompts * config.rollout.samples
  most = min(config.rollout.slots or completions, completions)
  shards = mesh_lib.batch_shards(programs.decoding[1])
  limit = mesh_lib.memory_limit(programs.mesh)
  size = f' of {limit / 1e9:.4g} GB' if limit else ''
  return (f'a device{size} holds {_in_gigabytes(held(programs))}, '
          f'{slot / 1e9:.4g} GB for each of up to {-(-most // shards)} slots '
          'of the cache, and the temporaries of a program')


def _in_gigabytes(sizes: Mapping[str, int]) -> str:
  """'weights 1.5 GB, gradient 0.5 GB', without the parts of size 0."""
  return ', '.join(f'{name} {size / 1e9:.4g} GB'
                   for name, size in sizes.items() if size)
