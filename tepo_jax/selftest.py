"""Checks in about a minute what the devices of this machine can do.

  python -m tepo_jax.selftest [--device=gpu] [--measure]

Prints a line for each check: the devices, their memory, their own attention
backend against xla, and then one step of training on the embedded task in
bfloat16: a rollout, its updates, a checkpoint. After a check that fails the
others continue; the status is then 1. launch/setup.sh runs it after it has
installed jax for a GPU or TPU.

With --measure it then times scoring, an update and decode steps of a model of
0.3B parameters, for some minutes, and prints a row for each, with the planner's
roofline. Add them to ROWS in tools/plan/published.py, and plans of these phases
for such chips rest on your measurement alone.
"""

from collections.abc import Iterator
import contextlib
import functools
import io
import json
import pathlib
import signal
import tempfile
import time

from absl import flags
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import base_model
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.job import trainer
from tepo_jax.policy import attention
from tepo_jax.policy import transformer
from tepo_jax.runtime import host
from tepo_jax.runtime import interrupts
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.runtime import processes
from tepo_jax.tools.benchmark import calibration
from tepo_jax.tools.plan import published

_DEVICE = flags.DEFINE_enum('device', None, ['cpu', 'gpu', 'tpu'],
                            'What jax must find; default: anything.')
_MEASURE = flags.DEFINE_bool(
    'measure', False, 'Also print rows for tools/plan/published.py.')

_CONFIG = pathlib.Path(__file__).parents[1] / 'configs/tiny.py'
_ATTENTION_ERROR = 0.02  # bfloat16 rounds to 0.4 %


def find_devices(wanted: str | None = None) -> str:
  """Names the devices.

  Raises:
    errors.RunError: they are of another kind than `wanted`.
  """
  devices = jax.devices()
  found = (f'{len(devices)} x {devices[0].device_kind} '
           f'({devices[0].platform}), jax {jax.__version__}')
  if wanted not in (None, devices[0].platform):
    raise errors.RunError(f'no {wanted}; jax found {found}')
  return found


def read_memory() -> str:
  """States the memory of a device and of the machine."""
  stats = jax.devices()[0].memory_stats()
  device = (f'{stats["bytes_limit"] / 2**30:.1f} GiB a device'
            if stats else 'devices report none')
  return f'{device}; machine {host.memory_bytes() / 2**30:.1f} GiB'


def compare_attention(config: ml_collections.ConfigDict) -> str:
  """Compares the backend that training would use with xla in float32.

  The rows hold two sequences and padding. Compared are the outputs and the
  gradients, by ‖difference‖ / ‖xla's‖.

  Raises:
    errors.RunError: they differ by more than bfloat16 explains.
  """
  model = programs_lib.execution(transformer.ModelConfig(
      vocab_size=8, d_model=8, num_layers=1, num_heads=8, num_kv_heads=2,
      head_dim=128, d_ff=8, max_position=256, tie_embeddings=True),
                                 config.compute)
  generator = np.random.default_rng(0)
  column_S = np.arange(256)
  position_BS = np.broadcast_to(np.select(
      [column_S < 100, column_S < 230], [column_S, column_S - 100], -1),
                                (2, 256)).astype(np.int32)
  segment_BS = np.broadcast_to(column_S >= 100, (2, 256)).astype(np.int32)
  *arrays, seed = (generator.normal(size=(2, 256, heads, 128)).astype(
      np.float32) for heads in (8, 2, 2, 8))
  seed *= position_BS[..., None, None] >= 0  # the gradient of the outputs

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def results(dtype, backend, seed, position_BS, segment_BS, *arrays):
    out, pull_back = jax.vjp(
        lambda *arrays: attention.attend(
            *arrays, position_BS, backend=backend, segment_BS=segment_BS),
        *(x.astype(dtype) for x in arrays))
    return out * (seed != 0), *pull_back(seed.astype(dtype))

  inputs = seed, position_BS, segment_BS, *arrays
  found = results('bfloat16', model.attention, *inputs)
  with jax.default_matmul_precision('highest'):
    wanted = results('float32', 'xla', *inputs)
  error = max(
      float(jnp.linalg.norm(a.astype('float32') - b) / jnp.linalg.norm(b))
      for a, b in zip(found, wanted))
  if not error <= _ATTENTION_ERROR:  # also if it is NaN
    raise errors.RunError(
        f'{model.attention} differs from xla by {error:.0%}, and may by '
        f'{_ATTENTION_ERROR:.0%}: set config.compute.attention=xla')
  return f'{model.attention} is within {error:.1%} of xla in float32'


def train_one_step(config: ml_collections.ConfigDict, workdir: pathlib.Path
                   ) -> Iterator[tuple[str, str]]:
  """Trains for a step; yields (check, what it found)."""
  with contextlib.redirect_stdout(io.StringIO()), (
      contextlib.redirect_stderr(io.StringIO())):
    with lock_lib.FolderLock(workdir) as lock:
      run_folder.claim(config, workdir, lock)
      base_model.make(config, workdir / 'base_model')
      with session_lib.open_folder(config, workdir / 'base_model') as session:
        run = trainer.Trainer(config, session)
        run.open(workdir)
        with contextlib.closing(run):
          run.run(processes.StopRequest())
  record = json.loads(
      (workdir / 'metrics.jsonl').read_text().splitlines()[-1])
  completions = config.rollout.prompts * config.rollout.samples
  yield 'rollout', (
      f'{completions} completions of {record["response_length_mean"]:.0f} '
      'tokens; log π of sampler and trainer differ by '
      f'{record["logp_gap_mean"]:.1g} nats')
  yield 'update', (f'loss {record["loss"]:.3g}, gradient '
                   f'{record["grad_norm"]:.3g}')
  saved = workdir / 'checkpoints' / '1'
  if not saved.is_dir():
    raise errors.RunError('the step was not saved')
  size = sum(f.stat().st_size for f in saved.rglob('*') if f.is_file())
  yield 'save', f'{size / 1e6:.1f} MB'


def small_config() -> ml_collections.ConfigDict:
  """The embedded task, in bfloat16 and at a size that compiles fast."""
  config = cli.load_config(f'{_CONFIG}:tepo')
  config.update_from_flattened_dict({
      'steps': 1, 'eval.period': 0, 'checkpoint.period': 1,
      'compute.dtype': 'bfloat16', 'pretrain.num_layers': 1,
      'pretrain.worked_steps': 20, 'pretrain.mixed_steps': 1,
      'pretrain.demonstrations': 64, 'data.limit': 64, 'rollout.prompts': 8,
      'rollout.max_tokens': 16, 'train.minibatch_prompts': 8,
      'rollout.overlong_buffer': 15,  # else all rewards may be alike
      'rollout.dynamic_sampling': 'off'})
  return config


def measured_config() -> ml_collections.ConfigDict:
  """A model that keeps a device busy, and rows of 1,024 tokens."""
  config = small_config()
  config.update_from_flattened_dict({
      'pretrain.d_model': 1024, 'pretrain.num_layers': 16,
      'pretrain.num_heads': 8, 'pretrain.num_kv_heads': 2,
      'pretrain.head_dim': 128, 'pretrain.d_ff': 4096,
      'pretrain.vocabulary': 32768, 'data.max_prompt_tokens': 128,
      'rollout.max_tokens': 896, 'rollout.overlong_buffer': 0,
      'train.microbatch_tokens': 16384})
  return config


def run_checks(wanted: str | None = None) -> list[str]:
  """Prints what each check finds; returns the names of those that fail."""
  failed, start = [], time.perf_counter()

  def report(name, text):
    print(f'{name:<11}{text}  [{time.perf_counter() - start:.0f} s]',
          flush=True)

  def check(name, function, *arguments):
    try:
      result = function(*arguments)
      for part, text in ([(name, result)] if isinstance(result, str)
                         else result):
        report(part, text)
    except Exception as error:  # whatever the device or its driver raises
      failed.append(name)
      report(name, f'FAILED: {type(error).__name__}: {errors.one_line(error)}')

  check('device', find_devices, wanted)
  check('memory', read_memory)
  config = small_config()
  check('attention', compare_attention, config)
  with tempfile.TemporaryDirectory() as workdir:
    check('training', train_one_step, config, pathlib.Path(workdir) / 'run')
  return failed


def main() -> None:
  failed = run_checks(_DEVICE.value)
  if failed:
    raise errors.RunError(f'failed: {", ".join(failed)}')
  print('the self-test found nothing wrong')
  if _MEASURE.value:
    # The training run has made these signals requests to itself.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    interrupts.unwind_on_first()
    for row in calibration.measure(measured_config()):
      print(f'{published.source_of(row)},  # {row.efficiency:.0%} of the '
            'roofline', flush=True)


if __name__ == '__main__':
  cli.run(main)
