"""Checks a config: ranges, contradictions, overrides without effect; names and
types are checked by `cli`."""

from collections.abc import Iterable
import functools
import importlib.util
import math
import operator

import ml_collections

from configs import base
from tepo_jax import errors
from tepo_jax.job import programs
from tepo_jax.job import run_folder
from tepo_jax.learning import behaviour
from tepo_jax.learning import objective
from tepo_jax.learning import packing
from tepo_jax.policy import attention
from tepo_jax.policy import lora
from tepo_jax.policy import remat
from tepo_jax.rollout import dump
from tepo_jax.rollout import selection
from tepo_jax.data import datasets
from tepo_jax import grading
from tepo_jax.rollout import reward as reward_lib

_DTYPES = ('float32', 'bfloat16')
_CHOICES = {
    'rollout.dynamic_sampling': selection.MODES,
    'train.packing': packing.MODES,
    'train.behaviour.weight': behaviour.WEIGHTS,
    'compute.dtype': _DTYPES,
    'optimizer.momentum_dtype': _DTYPES,
    'compute.remat': ('auto', *remat.POLICIES),
    'compute.collectives': ('auto', *programs.COLLECTIVES),
    'compute.attention': attention.CHOICES,
    'reward.on_failure': ('stop', 'zero'),
    'dump.format': dump.FORMATS}

_MOST_BATCHES = 10_000  # a step notes the verdicts on each of their prompts

_POSITIVE = (
    'steps', 'data.max_prompt_tokens', 'rollout.prompts', 'rollout.max_tokens',
    'rollout.max_generation_batches', 'rollout.temperature',
    'rollout.logp_gap_limit', 'grading.workers', 'lora.alpha',
    'train.minibatch_prompts', 'train.epochs', 'train.microbatch_tokens',
    'train.chunk_size', 'optimizer.learning_rate', 'optimizer.epsilon',
    'optimizer.max_grad_norm', 'compute.unroll', 'eval.max_tokens',
    'rollout.chunk', 'checkpoint.period', 'checkpoint.keep',
    'dump.max_megabytes', 'reward.timeout', 'pretrain.batch',
    'pretrain.demonstrations',
    'pretrain.learning_rate', 'pretrain.d_model', 'pretrain.num_layers',
    'pretrain.num_heads', 'pretrain.num_kv_heads',
    'pretrain.head_dim', 'pretrain.d_ff', 'benchmark.vocabulary',
    'benchmark.prompt_tokens', 'benchmark.mean_tokens', 'benchmark.rounds')
_NOT_NEGATIVE = (
    'seed', 'data.skip_bad', 'lora.rank', 'optimizer.weight_decay',
    'eval.period',
    'eval.top_k', 'checkpoint.keep_every', 'dump.period',
    'pretrain.worked_steps', 'pretrain.mixed_steps',
    'rollout.overlong_buffer', 'rollout.overlong_factor')
_POSITIVE_IF_GIVEN = (
    'data.limit', 'eval.limit', 'eval.samples', 'rollout.slots',
    'rollout.tensor', 'checkpoint.minutes')

# Fields that have no effect while another field has this value.
_OFF = (
    ('lora.', 'lora.rank', 0), ('eval.', 'eval.period', 0),
    ('dump.', 'dump.period', 0),
    ('train.behaviour.', 'train.behaviour.weight', 'off'),
    ('rollout.overlong_factor', 'rollout.overlong_buffer', 0),
    ('method.reg.', 'method.reg.region', 'none'),
    ('method.reg.', 'method.reg.coef', 0))
# Fields that have an effect only while another field has this value.
_NEEDED = (
    ('rollout.max_generation_batches', 'rollout.dynamic_sampling', 'refill'),)


def check(config: ml_collections.ConfigDict, overridden: Iterable[str]) -> None:
  """Refuses a config that cannot run, or overrides that have no effect.

  `overridden` are dotted names of the fields given on the command line.

  Raises:
    errors.InputError: names the field, its value and what is wrong.
  """
  check_values(config)
  if config.eval.period:
    check_decodings(config.eval)
  _check_rewards(config.reward)
  _check_geometry(config)
  if config.wandb_project and importlib.util.find_spec('wandb') is None:
    raise errors.InputError(
        f'config.wandb_project={config.wandb_project}: wandb is not '
        'installed; run .venv/bin/python -m pip install wandb')
  for name in overridden:
    if reason := _inert(config, name):
      raise errors.InputError(f'config.{name} has no effect: {reason}')


def check_saved(config: ml_collections.ConfigDict, path: str) -> None:
  """Checks fields, types and values of a config that was read from `path`.

  Raises:
    errors.InputError: names the file and the field.
  """
  known = base.get_config()
  found = run_folder.field_names(config)
  for name in run_folder.field_names(known):
    if name.startswith('method.'):
      name = 'method'  # its other fields depend on the method
    *sections, field = name.split('.')
    kind = functools.reduce(
        operator.getitem, sections, known).get_type(field)
    if name not in (*found, *config):
      raise errors.InputError(
          f'{path} was not written by this version: {name} is missing')
    value = _value(config, name)
    optional = _value(known, name) is None
    if not (type(value) is kind or kind is float and type(value) is int
            or optional and value is None):
      raise errors.InputError(
          f'{path}: {name} is {value!r}, not of type {kind.__name__}')
  try:
    check_values(config)
  except errors.InputError as error:
    raise errors.InputError(f'{path}: {error}') from error


def check_decodings(settings: ml_collections.ConfigDict) -> None:
  """Refuses sets of `config.eval` without samples or temperature.

  Raises:
    errors.InputError: names the set.
  """
  for name in settings.sets:
    datasets.decoding(name, settings.samples, settings.temperature)


def check_values(config: ml_collections.ConfigDict) -> None:
  """Refuses values that are out of range; for every program.

  Raises:
    errors.InputError: names the field, its value and what it must be.
  """
  objective.make_policy_loss(config.method)
  _check_ranges(config)
  for name, choices in _CHOICES.items():
    _require(config, name, _value(config, name) in choices,
             f'one of {", ".join(choices)}')
  _require(config, 'data.name', config.data.name, 'a set or a file')
  if source := datasets.SETS.get(config.data.name):
    subset = f':{source.config}' if source.config else ''
    _require(config, 'data.name', source.trains, 'a training set: this is the '
             f'benchmark {source.hub}{subset}@{source.split}')
  _require(config, 'eval.sets', all(
      isinstance(name, str) and name for name in config.eval.sets),
           'names of sets or files')
  _require(config, 'profile.steps',
           all(type(step) is int and step > 0 for step in config.profile.steps),
           'rollout steps: integers from 1 on')
  _require(config, 'lora.targets', config.lora.targets and all(
      target in lora.TARGETS for target in config.lora.targets),
           f'a non-empty subset of {", ".join(lora.TARGETS)}')


def _check_ranges(config):
  for name in _POSITIVE:
    _require(config, name, 0 < _value(config, name) < math.inf, 'positive')
  for name in _NOT_NEGATIVE:
    _require(config, name, 0 <= _value(config, name) < math.inf, '0 or more')
  for name in _POSITIVE_IF_GIVEN:
    value = _value(config, name)
    _require(config, name, value is None or value > 0, 'positive')
  for name in ('optimizer.beta1', 'optimizer.beta2'):
    _require(config, name, 0 <= _value(config, name) < 1, 'in [0, 1)')
  _require(config, 'pretrain.num_heads',
           config.pretrain.num_heads % config.pretrain.num_kv_heads == 0,
           f'a multiple of num_kv_heads={config.pretrain.num_kv_heads}')
  _require(config, 'pretrain.direct_share',
           0 <= config.pretrain.direct_share <= 1, 'in [0, 1]')
  _require(config, 'benchmark.mixed_share',
           0 < config.benchmark.mixed_share <= 1, 'in (0, 1]')
  _require(config, 'rollout.max_generation_batches',
           config.rollout.max_generation_batches <= _MOST_BATCHES,
           f'at most {_MOST_BATCHES:,}')
  _require(config, 'rollout.samples', config.rollout.samples >= 2,
           'at least 2: the advantage compares a group\'s samples')
  # Equal log-probabilities must give weight 1.
  _require(config, 'train.behaviour.cap', config.train.behaviour.cap >= 1,
           'at least 1')
  _require(config, 'train.behaviour.reject_below',
           0 <= config.train.behaviour.reject_below <= 1, 'in [0, 1]')
  _require(config, 'train.behaviour.reject_above',
           config.train.behaviour.reject_above >= 1, 'at least 1')
  low, high = grading.MIN_TIMEOUT_S, grading.MAX_TIMEOUT_S
  _require(config, 'grading.timeout', low <= config.grading.timeout <= high,
           f'from {low} to {high}')
  _require(config, 'reward.timeout', config.reward.timeout <= high,
           f'at most {high}')
  _require(config, 'seed', config.seed < 2**32, 'less than 2^32')
  _require(config, 'eval.top_p', 0 < config.eval.top_p <= 1, 'in (0, 1]')
  temperature = config.eval.temperature
  _require(config, 'eval.temperature',
           temperature is None or temperature >= 0, '0 (greedy) or more')


def _check_rewards(settings):
  functions, weights = settings.functions, settings.weights
  if (not functions or not all(isinstance(name, str) for name in functions)
      or len(set(functions)) != len(functions)):
    raise errors.InputError(
        f'config.reward.functions={functions} must name at least one function, '
        'and none twice')
  if len(weights) != len(functions) or not all(
      type(weight) in (int, float) and abs(weight) <= reward_lib.LARGEST
      for weight in weights):
    raise errors.InputError(
        f'config.reward.weights={weights} must be a finite number for each of '
        f'config.reward.functions={functions}')
  for name in functions:
    if name != reward_lib.ACCURACY:
      reward_lib.find(name)


def _check_geometry(config):
  prompts = config.rollout.prompts
  minibatch = config.train.minibatch_prompts
  if prompts % minibatch:
    raise errors.InputError(
        f'config.rollout.prompts={prompts} is not a multiple of '
        f'config.train.minibatch_prompts={minibatch}')
  if config.rollout.overlong_buffer > config.rollout.max_tokens:
    raise errors.InputError(
        f'config.rollout.overlong_buffer={config.rollout.overlong_buffer} is '
        f'more than config.rollout.max_tokens={config.rollout.max_tokens}')
  if config.model is None and not config.pretrain.worked_steps:
    raise errors.InputError(
        'config.model is not set: give a Hugging Face folder')


def _inert(config, name):
  """The reason why a field has no effect under this config, or None."""
  if name == 'method_name':
    return 'select the method by name, --config=FILE.py:METHOD'
  if name.startswith('benchmark.'):
    return 'only tepo_jax.benchmark and tepo_jax.plan use it'
  if name.startswith('pretrain.') and config.model is not None:
    return 'config.model is set, so no model is made'
  if name.startswith('data.columns.') and all(
      map(datasets.is_named, (config.data.name, *(
          config.eval.sets if config.eval.period else ())))):
    return 'named sets have columns of their own'
  for fields, switch, off in _OFF:
    if name.startswith(fields) and name != switch and (
        _value(config, switch) == off):
      return f'config.{switch} is {off}'
  for field, switch, needed in _NEEDED:
    if name == field and _value(config, switch) != needed:
      return f'config.{switch} is not {needed}'
  return None


def _value(config, name):
  return functools.reduce(operator.getitem, name.split('.'), config)


def _require(config, name, holds, wanted):
  if not holds:
    raise errors.InputError(
        f'config.{name}={_value(config, name)!r}: must be {wanted}')
