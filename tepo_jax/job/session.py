"""An opened model folder on a mesh, with prompts, samplers and a grader."""

import dataclasses
import datetime
import functools
import math
import os
import pathlib
import stat
import tempfile
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
import ml_collections
import transformers

from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.data import chat_templates
from tepo_jax.data import datasets
from tepo_jax.data import embedded
from tepo_jax.data import problem as problem_lib
from tepo_jax.data import prompts
from tepo_jax.job import base_model
from tepo_jax.job import carrying
from tepo_jax.job import configuration
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import prompt_sets
from tepo_jax.job import provenance
from tepo_jax.job import sampling as sampling_lib
from tepo_jax.job import slots as slots_lib
from tepo_jax.policy import rope
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import hub
from tepo_jax.policy.huggingface import weights
from tepo_jax.rollout import draw
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import reward as reward_lib
from tepo_jax.rollout import sampler as sampler_lib
from tepo_jax.rollout import schedule
from tepo_jax.rollout import stopping
from tepo_jax.runtime import files
from tepo_jax.runtime import host
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import processes
from tepo_jax.runtime import progress as progress_lib

# Folders in the workdir.
BASE_MODEL = 'base_model'  # only if the config names no model
CHECKPOINTS = 'checkpoints'
ROLLOUTS = 'rollouts'


@dataclasses.dataclass
class Session:
  """What training and evaluation share; a context manager.

  Attributes:
    model: architecture and execution fields, for `mesh`. folder: of the model.
    eos_ids: every token that ends a completion.
    template: of the prompts.
    grader, rewards: closed with the session. timers: seconds by phase.
    sets: name -> problems, of the sets loaded so far. too_long: name -> how
      many of them were skipped for the length of their prompts.
  """
  config: ml_collections.ConfigDict
  mesh: jax.sharding.Mesh
  model: transformer.ModelConfig
  folder: str
  tokenizer: transformers.PreTrainedTokenizerBase
  eos_ids: tuple[int, ...]
  template: prompts.Template
  grader: grading.Grader
  rewards: reward_lib.RewardFunctions
  timers: progress_lib.Timers
  sets: dict[str, list[problem_lib.Problem]] = dataclasses.field(
      default_factory=dict)
  too_long: dict[str, int] = dataclasses.field(default_factory=dict)

  def __enter__(self) -> 'Session':
    return self

  def __exit__(self, *exception):
    self.rewards.close()
    self.grader.close()

  def decoding(self) -> tuple[transformer.ModelConfig, jax.sharding.Mesh]:
    """The model and mesh of sampling, see `sampling.for_decoding`."""
    return sampling_lib.for_decoding(
        self.model, self.mesh, self.config.rollout.tensor)

  def check_positions(self, section: str) -> None:
    """Refuses completions of `config.rollout` or `config.eval` that are too
    long for the model.

    Raises:
      errors.InputError: names the field.
    """
    longest = (self.config.data.max_prompt_tokens
               + self.config[section].max_tokens)
    positions = rope.longest(self.model.max_position, self.model.rope_scaling)
    if longest > positions:
      raise errors.InputError(
          f'{self.folder}: data.max_prompt_tokens + {section}.max_tokens = '
          f'{longest} exceeds the model\'s {positions} positions')

  def load_params(self) -> Any:
    """Loads the folder's weights as fp32, in the training layout.

    Raises:
      errors.InputError: they are not finite, or as `weights.load`.
    """
    return provenance.load(self.folder, self.mesh)[1]

  def training_prompts(self) -> groups_lib.Mixture:
    """Loads the prompts of `config.data` that are short enough, in the run's
    data order.

    It logs how many are too long, and how many problems other sets share.

    Raises:
      errors.InputError: completions may be too long for the model, a bad set,
        or none of its prompts is short enough.
    """
    self.check_positions('rollout')
    found = prompt_sets.training(self.config, self.tokenizer)
    return groups_lib.Mixture(
        {each.name: self._prompts(each) for each in found},
        [weight for _, weight, _ in configuration.training_sets(
            self.config.data)], self.config.seed)

  def evaluation_prompts(self, name: str) -> list[groups_lib.Prompt]:
    """Loads a set of `config.eval.sets`, as `training_prompts` does."""
    return self._prompts(prompt_sets.evaluation(
        self.config, self.template, self.tokenizer, name))

  def _prompts(self, found):
    name, problems = found.name, found.problems
    prompt_sets.check_vocabulary(
        found, self.tokenizer, self.model.vocab_size, self.folder)
    for other, others in self.sets.items():
      # The splits of an embedded task, which has one name, share none.
      if other == name and embedded.is_task(name):
        continue
      if count := datasets.overlap(problems, others):
        errors.note(
            f'{name}: {count} of {errors.counted(len(problems), "problem")} '
            f'{"is" if count == 1 else "are"} also in '
            f'{"the training set" if other == name else other}')
    self.sets[name], self.too_long[name] = problems, len(found.long)
    longest = self.config.data.max_prompt_tokens
    if found.long:
      errors.note(
          f'{name}: skipped {len(found.long)} of {len(problems)} prompts, '
          f'longer than data.max_prompt_tokens={longest}')
    if not found.short:
      raise errors.InputError(f'{name}: every prompt is longer than '
                              f'data.max_prompt_tokens={longest} tokens')
    return [groups_lib.Prompt(problem, tuple(ids), index)
            for index, (problem, ids) in enumerate(found.short)]

  def sampler(self, *, prompts: int, samples: int, max_tokens: int,
              decoding: draw.Decoding, stop_after_boxed: bool = False,
              carries: bool = False, sizes: carrying.Sizes | None = None,
              prefix: tuple[int, ...] = ()) -> sampler_lib.GroupSampler:
    """Makes a sampler for calls with up to `prompts` prompts. Its first call
    sizes the slots, by `config.rollout.slots` or the memory that is then free.

    carries: whether completions are carried. sizes: of the run so far, which
    are kept if neither the config nor the mesh has changed them. prefix:
    `groups.shared_prefix` of the prompts.
    """
    settings = self.config.rollout

    @functools.cache
    def make_schedule():
      decoding_on = self.decoding()
      known = carrying.kept(sizes, settings, decoding_on[1])
      shapes = slots_lib.sampling_shapes(
          *decoding_on, cache=settings.cache,
          wanted=known.slots if known else settings.slots,
          work=prompts * samples, samples=samples, max_tokens=max_tokens,
          prompt_tokens=self.config.data.max_prompt_tokens,
          chunk=settings.chunk, carries=carries, prefix=prefix,
          pages=known and known.pages)
      memory_lib.check_cache(*decoding_on, shapes)
      return schedule.Schedule(
          sampling_lib.maker(settings.cache)(
              *decoding_on, decoding=decoding, eos_ids=self.eos_ids,
              chunk=settings.chunk),
          shapes, stopping.first_of([
              *([functools.partial(stopping.after_boxed, self.tokenizer)]
                if stop_after_boxed else []),
              *([stopping.at_strings(self.tokenizer, settings.stop)]
                if settings.stop else [])]))

    return sampler_lib.GroupSampler(
        schedule=make_schedule, group_size=samples, max_tokens=max_tokens,
        grader=self.grader, tokenizer=self.tokenizer, timers=self.timers)

  def parameters(self) -> int:
    """The number of the model's weights, without adapters and padding."""
    model = dataclasses.replace(
        self.model, lora=None, vocab_padding=0, kv_copies=1)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(
        transformer.abstract_params(model)))


def open_folder(config: ml_collections.ConfigDict, folder: str | os.PathLike
                ) -> Session:
  """Reads a model folder, except its weights.

  Raises:
    errors.InputError: a bad folder or mesh.
  """
  mesh = mesh_lib.make(config.mesh)
  weights.check(folder, mesh)
  tokenizer = weights.load_tokenizer(folder)
  return _open(config, mesh, folder, weights.model_config(folder), tokenizer,
               weights.eos_ids(folder, tokenizer))


def open_unmade(config: ml_collections.ConfigDict, folder: str | os.PathLike
                ) -> Session:
  """As `open_folder` of the folder that `base_model.make` has yet to make."""
  mesh = mesh_lib.make(config.mesh)
  with tempfile.TemporaryDirectory() as scratch:
    tokenizer = base_model.make_tokenizer(config, scratch)
    eos_ids = weights.eos_ids(scratch, tokenizer)
  model = base_model.model_config(config.pretrain, len(tokenizer))
  weights.check_mesh(model, mesh)
  return _open(config, mesh, folder, model, tokenizer, eos_ids)


def _open(config, mesh, folder, model, tokenizer, eos_ids):
  model = programs_lib.prepare_model(model, config, mesh)
  if max(eos_ids) >= model.vocab_size:
    raise errors.InputError(
        f'{folder}: the end token {max(eos_ids)} is beyond the model\'s '
        f'vocabulary of {model.vocab_size}')
  if max(config.rollout.stop_ids, default=0) >= model.vocab_size:
    raise errors.InputError(
        f'config.rollout.stop_ids={config.rollout.stop_ids}: {folder} has a '
        f'vocabulary of {model.vocab_size}')
  stopping.check(tokenizer, config.rollout.stop)
  eos_ids = tuple(sorted({*eos_ids, *config.rollout.stop_ids}))
  template = prompt_sets.template(config)
  if (tokenizer.chat_template is None and template.is_chat
      and processes.is_first()):
    errors.note(
        f'warning: {folder}: the tokenizer has no chat template, so prompts '
        f'are plain text (data.template={config.data.template})')
  rollout, reward = config.rollout, config.reward
  return Session(
      config=config, mesh=mesh, model=model, folder=str(folder),
      tokenizer=tokenizer, eos_ids=eos_ids, template=template,
      grader=grading.Grader(
          config.grading.workers, template.style, config.grading.timeout,
          config.grading.verifier),
      rewards=reward_lib.RewardFunctions(
          dict(zip(reward.functions, reward.weights)),
          max_tokens=rollout.max_tokens,
          overlong_buffer=rollout.overlong_buffer,
          overlong_factor=rollout.overlong_factor,
          workers=config.grading.workers, timeout_s=reward.timeout),
      timers=progress_lib.Timers())


def model_folder(config: ml_collections.ConfigDict,
                 workdir: str | os.PathLike) -> str:
  """The folder of the model that a run starts from.

  Raises:
    errors.InputError: config.model is no folder, and the hub does not have it.
  """
  if config.model is None:
    return str(files.path(workdir) / BASE_MODEL)
  return str(hub.folder_of_job(config.model))


def fix_date(config: ml_collections.ConfigDict, folder: str | os.PathLike,
             *earlier: str | None) -> None:
  """Sets `config.data.date` if a model folder's chat template reads the clock:
  to the first date of `earlier`, or else to today, in all processes."""
  folder = hub.folder(folder, hub.TOKENIZER_FILES)
  reads_clock = processes.any_of(any(
      chat_templates.CLOCK.encode() in (folder / name).read_bytes()
      for name in hub.CHAT_TEMPLATES if (folder / name).is_file()))
  if config.data.date is not None or not reads_clock:
    return
  found = next(filter(None, earlier), None)
  date = (datetime.date.fromisoformat(found) if found
          else datetime.date.today())
  config.data.date = datetime.date.fromordinal(
      processes.of_first(date.toordinal())).isoformat()


def cache_compilations(config: ml_collections.ConfigDict) -> None:
  """Makes `config.compute.cache`, or the user's own cache folder, the folder of
  JAX's compilation cache; creates it, so call this after the checks of a run.

  Programs from the cache are executed, so that a folder in which other users
  can plant one gets a warning.
  """
  folder = config.compute.cache or jax.config.jax_compilation_cache_dir
  try:
    if folder is None:
      folder = host.cache_folder()
    if not files.is_remote(folder):
      pathlib.Path(folder).mkdir(0o700, parents=True, exist_ok=True)
      _warn_of_other_writers(pathlib.Path(folder))
    files.path(folder)  # JAX then reaches a bucket by the project's client
  except (OSError, RuntimeError, errors.InputError) as error:
    errors.note(f'warning: compute.cache={folder}: {errors.one_line(error)}; '
                'compiled programs are not kept')
    return
  jax.config.update('jax_compilation_cache_dir', str(folder))
  # Earlier compilations may have recorded that there is no cache.
  compilation_cache.reset_cache()


def _warn_of_other_writers(folder):
  found = folder.stat()
  if processes.is_first() and (
      found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
      or found.st_uid not in (os.getuid(), 0)):
    errors.note(f'warning: compute.cache={folder}: other users can write to '
                'it, and this program runs what it finds there')
