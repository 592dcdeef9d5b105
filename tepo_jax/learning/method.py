"""Reads a method's config row: checks every name, key and number.

`read` turns the names of a row (configs/methods.py) into functions of
`objective`, with the row's numbers bound. A number is a keyword-only parameter
of such a function, annotated with its range (`ranges`); one with a default is
optional. Rows are dicts or ConfigDicts. Every error is an errors.InputError:
one line that names the field and lists the choices.
"""

import dataclasses
import functools
import inspect
from typing import Callable

from tepo_jax import errors
from tepo_jax.learning import ranges


@dataclasses.dataclass(frozen=True)
class Method:
  """A method: its functions with their numbers bound, and its coefficients."""
  weight: Callable
  clip: functools.partial
  shape: functools.partial
  aggregate: functools.partial
  penalty: Callable
  region: functools.partial
  coef: float
  regularised: bool  # False if coef is 0 or the region is `none`
  delta_entropy: Callable
  entropy_tolerance: float  # dead zone: |dH| up to it counts as 0
  estimator: str  # for advantage.group_advantage


def read(row, tables):
  """The Method of a row.

  Args:
    row: mapping with weight, clip, shape, aggregate, reg, [estimator='grpo'];
      clip, shape and aggregate are mappings with a name and its numbers, or a
      name alone; reg is a mapping with penalty, region, coef, the region's
      numbers, [delta_entropy='exact'], [entropy_tolerance=0].
    tables: choice -> (name -> function).

  Raises:
    errors.InputError: the row is wrong, or a number's Range is missing.
  """
  row = {'estimator': 'grpo'} | _mapping('method', row)
  _fields('method', row, ('weight', 'clip', 'shape', 'aggregate', 'reg'),
          ('estimator',))
  reg = {'delta_entropy': 'exact', 'entropy_tolerance': 0.0} | _mapping(
      'method.reg', row['reg'])
  region = _bind('method.reg', tables['region'], reg, key='region', also=(
      'penalty', 'coef', 'delta_entropy', 'entropy_tolerance'))
  _choose('method.estimator', tables['estimator'], row['estimator'])
  coef = ranges.FINITE.check('method.reg.coef', reg['coef'])
  clip, shape, aggregate = (
      _bind(f'method.{choice}', tables[choice], row[choice])
      for choice in ('clip', 'shape', 'aggregate'))
  return Method(
      weight=_choose('method.weight', tables['weight'], row['weight']),
      clip=clip, shape=shape, aggregate=aggregate, region=region, coef=coef,
      penalty=_choose('method.reg.penalty', tables['penalty'], reg['penalty']),
      regularised=coef != 0 and reg['region'] != 'none',
      delta_entropy=_choose('method.reg.delta_entropy',
                            tables['delta_entropy'], reg['delta_entropy']),
      entropy_tolerance=ranges.AMOUNT.check(
          'method.reg.entropy_tolerance', reg['entropy_tolerance']),
      estimator=row['estimator'])


def _mapping(field, value):
  """The items of a dict or ConfigDict."""
  try:
    return dict(value.items())
  except AttributeError:
    raise errors.InputError(
        f'{field}: {value!r} is not a mapping of names to values') from None


def _fields(field, settings, required, optional=()):
  """Refuses missing and unknown keys."""
  known = ', '.join([*required, *(f'[{key}]' for key in optional)])
  for key in required:
    if key not in settings:
      raise errors.InputError(f'{field}.{key}: missing; {field} has {known}')
  for key in settings:
    if key not in required and key not in optional:
      raise errors.InputError(
          f'{field}.{key}: no such field; {field} has {known}')


def _choose(field, table, name):
  """The entry of that name."""
  if not isinstance(name, str) or name not in table:
    raise errors.InputError(
        f'{field}: {name!r} is not one of {", ".join(table)}')
  return table[name]


def _bind(field, table, settings, key='name', also=()):
  """The function of `table` that `settings[key]` names, as a partial.

  Args:
    field: where the settings are, for the errors.
    settings: the name and the numbers, or the name alone; None for an
      optional number is the same as leaving it out.
    also: fields that are not numbers of the function.
  """
  if isinstance(settings, str):
    function, settings = _choose(field, table, settings), {key: settings}
  else:
    settings = _mapping(field, settings)
    _fields(field, settings, (key,), settings)
    function = _choose(f'{field}.{key}', table, settings[key])
  parameters = {p.name: p for p in inspect.signature(
      function).parameters.values() if p.kind is p.KEYWORD_ONLY}
  optional = [p.name for p in parameters.values() if p.default is not p.empty]
  required = [name for name in parameters if name not in optional]
  _fields(field, settings, (key, *also, *required), optional)
  bound = {}
  for name, parameter in parameters.items():
    value, allowed = settings.get(name), parameter.annotation
    if value is None and name in optional:
      continue
    if not isinstance(allowed, ranges.Range):
      raise errors.InputError(
          f'{field}.{name}: no range; annotate parameter {name} of '
          f'{function.__name__} with one of learning/ranges.py')
    bound[name] = allowed.check(f'{field}.{name}', value)
  return functools.partial(function, **bound)
