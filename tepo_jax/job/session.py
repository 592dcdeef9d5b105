"""What training and evaluation share: mesh, model folder, prompts, sampler."""

import dataclasses
import os
import pathlib
import sys
from typing import Any

import huggingface_hub
import jax
import ml_collections
import transformers

from configs import base
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import steps
from tepo_jax.policy import transformer
from tepo_jax.policy import weights
from tepo_jax.rollout import collect
from tepo_jax.rollout import generation
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import metrics
from tepo_jax.tasks import datasets
from tepo_jax.tasks import grading
from tepo_jax.tasks import prompts

BASE_MODEL = 'base_model'  # in the workdir, where the config names no model
CHECKPOINTS = 'checkpoints'  # in the workdir

_MODEL_FILES = ('*.json', '*.safetensors', '*.jinja', 'tokenizer.model')


@dataclasses.dataclass
class Session:
  """An opened model folder on a mesh.

  Attributes:
    config, mesh, tokenizer, eos_ids: what the names say.
    model: architecture and execution fields.
    folder: where the model came from.
    grader: to be closed with the session.
    timers: seconds by phase.
    sets: the problems of each set asked for so far.
  """
  config: ml_collections.ConfigDict
  mesh: jax.sharding.Mesh
  model: transformer.ModelConfig
  folder: str
  tokenizer: transformers.PreTrainedTokenizerBase
  eos_ids: tuple[int, ...]
  grader: grading.Grader
  timers: metrics.Timers
  sets: dict[str, list[datasets.Problem]] = dataclasses.field(
      default_factory=dict)

  def __enter__(self) -> 'Session':
    return self

  def __exit__(self, *exception):
    self.grader.close()

  def load_params(self) -> Any:
    """The folder's weights as fp32, in the training layout."""
    return weights.load(self.folder, 'float32', self.mesh)[1]

  def prompts(self, name: str, split: str | None,
              limit: int | None) -> list[collect.Prompt]:
    """The set's prompts that are short enough; says how many are not, and
    how many of its problems another set has too.

    Raises:
      errors.InputError: a bad set, or no prompt is short enough.
    """
    problems = datasets.load(name, split, limit)
    for other, others in self.sets.items():
      count = datasets.overlap(problems, others) if other != name else 0
      if count:
        print(f'{name}: {count} of {len(problems)} problems are in {other} '
              'too', file=sys.stderr)
    self.sets[name] = problems
    data = self.config.data
    rendered, dropped = prompts.render_short(
        problems, data.template, self.tokenizer, data.max_prompt_tokens)
    if dropped:
      print(f'{name}: {dropped} of {len(problems)} prompts are longer than '
            f'data.max_prompt_tokens={data.max_prompt_tokens} and left out',
            file=sys.stderr)
    if not rendered:
      raise errors.InputError(
          f'{name}: no prompt of at most data.max_prompt_tokens='
          f'{data.max_prompt_tokens} tokens')
    return [collect.Prompt(problem, tuple(ids), index)
            for index, (problem, ids) in enumerate(rendered)]

  def sampler(self, *, prompts_at_once: int, samples: int, max_tokens: int,
              temperature: float) -> generation.GroupSampler:
    """A sampler of that many prompts at a time, rounded up to the mesh."""
    rows = prompts_at_once + -prompts_at_once % mesh_lib.batch_shards(self.mesh)
    return generation.GroupSampler(
        generate=steps.make_generate(
            self.model, self.mesh, group_size=samples, max_tokens=max_tokens,
            temperature=temperature, eos_ids=self.eos_ids),
        rows=rows, width=self.config.data.max_prompt_tokens,
        group_size=samples, grader=self.grader, tokenizer=self.tokenizer,
        mesh=self.mesh, timers=self.timers)


def open_folder(config: ml_collections.ConfigDict, folder: str | os.PathLike
                ) -> Session:
  """Reads everything of a model folder but its weights.

  Raises:
    errors.InputError: a bad folder, mesh, or lengths beyond the model's
      positions.
  """
  mesh = mesh_lib.make(config.mesh)
  weights.check(folder, mesh)
  model = steps.execution(weights.read_config(folder), config.compute)
  slots = config.data.max_prompt_tokens + max(
      config.rollout.max_tokens, config.eval.max_tokens)
  if slots > model.max_position:
    raise errors.InputError(
        f'{folder}: data.max_prompt_tokens + max_tokens = {slots} is more '
        f'than the model\'s {model.max_position} positions')
  tokenizer = weights.load_tokenizer(folder)
  return Session(
      config=config, mesh=mesh, model=model, folder=str(folder),
      tokenizer=tokenizer, eos_ids=weights.eos_ids(folder, tokenizer),
      grader=grading.Grader(
          config.grading.workers, prompts.get(config.data.template).style,
          config.grading.timeout),
      timers=metrics.Timers())


def model_folder(config: ml_collections.ConfigDict,
                 workdir: str | os.PathLike) -> str:
  """The local folder of the model that a run starts from.

  A `config.model` that is no folder is a hub id; what it names is downloaded
  to the hub's cache, or taken from there.

  Raises:
    errors.InputError: neither a folder nor to be had from the hub.
  """
  if config.model is None:
    return str(pathlib.Path(workdir) / BASE_MODEL)
  if os.path.isdir(config.model):
    return config.model
  try:
    return huggingface_hub.snapshot_download(
        config.model, allow_patterns=_MODEL_FILES)
  except (huggingface_hub.errors.HFValidationError,
          huggingface_hub.errors.HfHubHTTPError,
          huggingface_hub.errors.LocalEntryNotFoundError, OSError) as error:
    reason = str(error).strip().split('\n')[0]
    raise errors.InputError(
        f'config.model={config.model}: no such folder, and not to be had from '
        f'the hub ({reason})') from error


def restore_params(workdir: str | os.PathLike, mesh: jax.sharding.Mesh,
                   step: int | None = None) -> tuple[str, Any]:
  """The folder a run started from, and the fp32 weights of a checkpoint.

  Raises:
    errors.InputError: not a run's workdir, or no such checkpoint.
  """
  config = cli.read_config(workdir)
  lacking = cli.field_names(base.get_config()).keys() - cli.field_names(config)
  lacking = sorted(n for n in lacking if not n.startswith('method.'))
  if lacking:
    raise errors.InputError(
        f'{workdir}/config.json is not the config of a run of this version: '
        f'{lacking[0]} is missing')
  folder = model_folder(config, workdir)
  programs = steps.make(config, weights.read_config(folder), mesh)
  checkpointer = checkpoint.Checkpointer(
      pathlib.Path(workdir) / CHECKPOINTS, read_only=True)
  state, _ = checkpointer.restore(step, steps.abstract_state(programs))
  checkpointer.close()
  return folder, state.params
