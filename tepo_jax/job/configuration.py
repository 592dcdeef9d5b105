"""All that is asked of a config's fields: checks, resume, help, suggestions.

A field's default, meaning, range and resume rule are its entry in the tables of
configs/base.py and configs/tiny.py. What a table cannot say is here: what
fields must be with each other, with data sets and with reward functions.
Nothing here imports jax until a method is checked, so that --help answers at
once.
"""

from collections.abc import Iterable
import functools
import importlib.util
import math
import operator
import textwrap

import ml_collections

from configs import base
from configs import fields as fields_lib
from configs import tiny
from tepo_jax import errors
from tepo_jax.data import datasets
from tepo_jax.rollout import reward as reward_lib

WITHOUT_ENTROPY = ('all', 'top_covariance')  # regions that ignore dH
_OPTIONAL = 'pretrain'  # the section that only some configs have
FIELDS = fields_lib.flat(base.FIELDS | {_OPTIONAL: tiny.PRETRAIN})


def training_sets(data: ml_collections.ConfigDict
                  ) -> list[tuple[str, int, str]]:
  """(set, weight, template) of each set that `config.data` trains on."""
  return [(name, weight, *(template or (data.template,)))
          for name, weight, *template in data.sets or ((data.name, 1),)]


def check(config: ml_collections.ConfigDict, overridden: Iterable[str]) -> None:
  """Refuses a config that cannot run, or overrides that have no effect.

  `overridden` are dotted names of the fields given on the command line.

  Raises:
    errors.InputError: names the field, its value and what is wrong.
  """
  check_values(config)
  if not config.data.sets and not config.data.name:
    _refuse(config, 'data.name', 'a set or a file')
  if config.eval.period:
    check_decodings(config.eval)
  _check_rewards(config.reward)
  _check_geometry(config)
  _check_schedule(config)
  _check_truncated(config)
  if config.wandb_project and importlib.util.find_spec('wandb') is None:
    raise errors.InputError(
        f'config.wandb_project={config.wandb_project}: wandb is not '
        'installed; run .venv/bin/python -m pip install wandb')
  if config.published.metric and config.published.after is None:
    raise errors.InputError(
        f'config.published.metric={config.published.metric}: set '
        'config.published.after, the number to compare with')
  for name in overridden:
    if reason := _without_effect(config, name):
      raise errors.InputError(f'config.{name} has no effect: {reason}')


def check_saved(config: ml_collections.ConfigDict, path: str) -> None:
  """Checks fields, types and values of a config that was read from `path`.

  Raises:
    errors.InputError: names the file and the field.
  """
  types = {name: (field.type, field.is_optional)
           for name, field in _fields(config).items()}
  found = {*fields_lib.flat(config), *config}
  for name, (kind, is_optional) in (
      types | {'method': (ml_collections.ConfigDict, False)}).items():
    if name not in found:
      raise errors.InputError(
          f'{path} was not written by this version: {name} is missing')
    value = _value(config, name)
    if not (type(value) is kind or kind is float and type(value) is int
            or is_optional and value is None):
      raise errors.InputError(
          f'{path}: {name} is {value!r}, not of type {kind.__name__}')
  with errors.naming(path):
    check_values(config)


def check_decodings(settings: ml_collections.ConfigDict) -> None:
  """Refuses sets of `config.eval` without samples or temperature, or with
  several samples and temperature 0.

  Raises:
    errors.InputError: names the set.
  """
  for name in settings.sets:
    samples, temperature = datasets.decoding(
        name, settings.samples, settings.temperature)
    if samples > 1 and temperature == 0:
      raise errors.InputError(
          f'config.eval.samples={samples}: at temperature 0 all completions of '
          f'a problem of {name} are the same; set config.eval.temperature')


def check_values(config: ml_collections.ConfigDict) -> None:
  """Refuses values that are out of range; for every program.

  Raises:
    errors.InputError: names the field, its value and what it must be.
  """
  from tepo_jax.learning import objective  # imports jax
  for name, field in _fields(config).items():
    value = _value(config, name)
    if not (value is None and field.is_optional or field.range.test(value)):
      _refuse(config, name, field.range.words)
  objective.make_policy_loss(config.method)
  for name, *_ in training_sets(config.data):
    source = datasets.SETS.get(name)
    if source is not None and not source.trains:
      subset = f':{source.config}' if source.config else ''
      _refuse(config, 'data.sets' if config.data.sets else 'data.name',
              f'a training set: {name} is the benchmark '
              f'{source.hub}{subset}@{source.split}')
  if _OPTIONAL in config:
    heads = config.pretrain.num_kv_heads
    if config.pretrain.num_heads % heads:
      _refuse(config, 'pretrain.num_heads',
              f'a multiple of num_kv_heads={heads}')


def _fields(config):
  """The entries of FIELDS that the config must have."""
  return {name: field for name, field in FIELDS.items()
          if _OPTIONAL in config or not name.startswith(f'{_OPTIONAL}.')}


def _value(config, name):
  return functools.reduce(operator.getitem, name.split('.'), config)


def _refuse(config, name, wanted):
  raise errors.InputError(
      f'config.{name}={_value(config, name)!r}: must be {wanted}')


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
      with errors.naming('config.reward.functions'):
        reward_lib.find(name)


def _check_geometry(config):
  prompts = config.rollout.prompts
  minibatch = config.train.minibatch_prompts
  if prompts % minibatch:
    _refuse(config, 'rollout.prompts',
            f'a multiple of config.train.minibatch_prompts={minibatch}')
  if config.train.shared_prefix >= config.data.max_prompt_tokens:
    _refuse(config, 'train.shared_prefix', 'less than '
            f'data.max_prompt_tokens={config.data.max_prompt_tokens}')
  weights = [weight for _, weight, _ in training_sets(config.data)]
  period = sum(weights) // math.gcd(*weights)
  if prompts % period:
    raise errors.InputError(
        f'config.rollout.prompts={prompts} is not a multiple of {period}, the '
        'sum of the weights of config.data.sets in lowest terms, so a step '
        'cannot have its share of each set')
  for name, unused, why in (
      ('rollout.weights', 'compute', 'the sampler\'s policy is then not π_old'),
      ('rollout.carry.max_versions', 0,
       'earlier policies than π_old then drew some of the tokens')):
    value = _value(config, name)
    if value != unused and config.train.behaviour.weight == 'off':
      raise errors.InputError(
          f'config.{name}={value}: {why}; set config.train.behaviour.weight='
          'token, which corrects for that')
  if config.rollout.overlong_buffer > config.rollout.max_tokens:
    _refuse(config, 'rollout.overlong_buffer',
            f'at most config.rollout.max_tokens={config.rollout.max_tokens}')
  if config.model is None and _OPTIONAL not in config:
    raise errors.InputError(
        'config.model is not set: give a Hugging Face folder')


def _check_schedule(config):
  settings = config.optimizer
  if settings.schedule == 'constant':
    return
  length = settings.schedule_steps
  if length is None or length <= settings.warmup_steps:
    _refuse(config, 'optimizer.schedule_steps',
            f'more than optimizer.warmup_steps={settings.warmup_steps}, as '
            f'optimizer.schedule is {settings.schedule}')
  if not settings.floor and config.steps > length:
    raise errors.InputError(
        f'config.steps={config.steps}: the learning rate is 0 after '
        f'config.optimizer.schedule_steps={length}; give fewer steps, or a '
        'config.optimizer.floor')


def _check_truncated(config):
  """Refuses a group baseline of two kinds of reward: less the KL to the
  reference policy, and, of masked completions, which are not scored, as they
  are."""
  from tepo_jax.learning import advantage  # imports jax
  from tepo_jax.learning import objective
  method = objective.make_policy_loss(config.method).method
  if (config.rollout.truncated == 'mask' and method.reference.coef
      and method.reference.place == 'reward'
      and not advantage.is_by_token(method.estimator)):
    raise errors.InputError(
        'config.rollout.truncated=mask: the KL of truncated completions is '
        'unknown, and config.method.reference.place=reward would take it from '
        'their rewards in the baseline of their group; set '
        'config.rollout.truncated=exclude')


def _without_effect(config, name):
  """The reason why a field has no effect under this config, or None."""
  if name == 'method_name':
    return 'select the method by name, --config=FILE.py:METHOD'
  if name == f'{_OPTIONAL}.vocabulary':
    return 'only tepo_jax.benchmark and tepo_jax.plan use it'
  if name.startswith(f'{_OPTIONAL}.') and config.model is not None:
    return 'config.model is set, so no model is made'
  if name == 'data.name' and config.data.sets and (
      config.model is not None or _OPTIONAL not in config):
    return 'config.data.sets names the sets'
  if name.startswith('data.columns.') and all(map(datasets.is_named, (
      *(source for source, *_ in training_sets(config.data)),
      *(config.eval.sets if config.eval.period else ())))):
    return 'named sets have columns of their own'
  if name in ('eval.greedy', 'eval.top_k', 'eval.top_p') and not any(
      datasets.decoding(source, config.eval.samples, config.eval.temperature)[1]
      for source in config.eval.sets):
    return 'all of config.eval.sets are decoded greedily'
  if (name in ('method.reg.delta_entropy', 'method.reg.entropy_tolerance')
      and config.method.reg.region in WITHOUT_ENTROPY):
    return (f'config.method.reg.region={config.method.reg.region} looks at no '
            'change of entropy')
  if name.startswith('method.'):  # its fields are in no table
    off = (('method.reg.region', 'none'), ('method.reg.penalty', 'none'),
           ('method.reg.coef', 0), ('method.reference.coef', 0))
    return next((f'config.{switch} is {value}' for switch, value in off
                 if name.startswith(switch.rpartition('.')[0] + '.')
                 and name != switch and _value(config, switch) == value), None)
  field = FIELDS[name]
  if field.unless and _value(config, field.unless[0]) == field.unless[1]:
    return f'config.{field.unless[0]} is {field.unless[1]}'
  if field.only_if and _value(config, field.only_if[0]) != field.only_if[1]:
    return f'config.{field.only_if[0]} is not {field.only_if[1]}'
  return None


def resume_rule(name: str) -> str:
  """What a resume may do with a field: SAME, ROUNDING or FREE of `fields`."""
  return FIELDS[name].resume if name in FIELDS else fields_lib.SAME


def may_differ_between_seeds(name: str) -> bool:
  """Whether runs that are seeds of one another may differ in the field: in the
  seed, and in what changes no result."""
  return name == 'seed' or resume_rule(name) == fields_lib.FREE


def help_text() -> str:
  """Every field by section: its default, meaning, range and resume rule."""
  lines = ['Fields of a config, as --config.FIELD=VALUE, and the defaults of '
           'configs/base.py', '(pretrain: configs/tiny.py). ★: changed first. '
           'method.FIELD: see configs/methods.py.']
  section = None
  for name, field in FIELDS.items():
    if (found := name.rpartition('.')[0].partition('.')[0]) != section:
      section = found
      lines.append('')
    default = None if field.is_optional else field.default
    notes = '; '.join(filter(None, (field.range.words, field.resume)))
    lines.append(textwrap.fill(
        f'{name}={default!r}: {field.meaning}' + (notes and f' ({notes})'), 79,
        initial_indent='  ', subsequent_indent='      '))
  return '\n'.join(lines)
