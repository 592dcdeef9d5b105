"""Reading a method's row: every name, key and number is checked here.

Works on any mapping with `items()`: a dict or a ConfigDict. All errors are
errors.InputError, one line that names the field and lists the choices.
"""

import dataclasses
import functools
import inspect
import math
import numbers
from typing import Callable

from tepo_jax import errors

# Parameter -> what it must be, and the test; NaN fails each of them.
_NUMBERS = {
    'low': ('a number in [0, 1] (or inf: no bound)',
            lambda x: 0 <= x <= 1 or x == math.inf),
    'high': ('a number >= 0 (inf: no bound)', lambda x: x >= 0),
    'dual': ('a number > 1', lambda x: x > 1),
    'fraction': ('a number in (0, 1]', lambda x: 0 < x <= 1),
    'band': ('a number', lambda x: not math.isnan(x)),
    'alpha': ('a finite number >= 0', lambda x: 0 <= x < math.inf),
    'kappa': ('a number > 0', lambda x: x > 0),
    'floor': ('a number in (0, 1]', lambda x: 0 < x <= 1),
    'coef': ('a finite number', math.isfinite),
    'entropy_tolerance': ('a number >= 0', lambda x: x >= 0),
}


@dataclasses.dataclass(frozen=True)
class Row:
  """A row with its names turned into functions, their numbers bound."""
  weight: Callable
  clip: functools.partial
  shape: functools.partial
  aggregate: Callable
  penalty: Callable
  region: functools.partial
  coef: float
  regularised: bool  # else coef is 0 or the region `none`
  delta_entropy: Callable
  entropy_tolerance: float  # dead zone: |dH| up to it counts as 0
  estimator: str  # for advantage.group_advantage


def read(row, tables):
  """Checks a row.

  Args:
    row: mapping with weight, clip, shape, aggregate, reg, [estimator='grpo'];
      clip and shape are mappings with a name and its numbers, reg one with
      penalty, region, coef, the region's numbers, [delta_entropy='exact'],
      [entropy_tolerance=0].
    tables: choice -> (name -> function).

  Returns:
    Row.

  Raises:
    errors.InputError.
  """
  row = {'estimator': 'grpo'} | _mapping('method', row)
  _fields('method', row, ('weight', 'clip', 'shape', 'aggregate', 'reg'),
          ('estimator',))
  reg = {'delta_entropy': 'exact', 'entropy_tolerance': 0.0} | _mapping(
      'method.reg', row['reg'])
  region = _bind('method.reg', tables['region'], reg, key='region', also=(
      'penalty', 'coef', 'delta_entropy', 'entropy_tolerance'))
  _choose('method.estimator', tables['estimator'], row['estimator'])
  coef = _number('method.reg.coef', reg['coef'])

  def choose(where, settings, name):
    return _choose(f'{where}.{name}', tables[name], settings[name])

  return Row(
      weight=choose('method', row, 'weight'),
      clip=_bind('method.clip', tables['clip'], row['clip']),
      shape=_bind('method.shape', tables['shape'], row['shape']),
      aggregate=choose('method', row, 'aggregate'),
      penalty=choose('method.reg', reg, 'penalty'),
      region=region,
      coef=coef,
      regularised=coef != 0 and reg['region'] != 'none',
      delta_entropy=choose('method.reg', reg, 'delta_entropy'),
      entropy_tolerance=_number(
          'method.reg.entropy_tolerance', reg['entropy_tolerance']),
      estimator=row['estimator'])


def part(whole, table):
  """table[whole.func] bound to those numbers of `whole` that it takes."""
  if whole.func not in table:
    return None
  function = table[whole.func]
  return functools.partial(
      function, **{name: whole.keywords[name] for name in _keywords(function)})


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


def _number(field, value):
  """A number in the range of its parameter, the last part of the field."""
  meaning, test = _NUMBERS[field.rsplit('.', 1)[-1]]
  real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not real or not test(value):
    raise errors.InputError(f'{field}: {value!r} is not {meaning}')
  return float(value)


def _pair(field, value):
  """(lower, upper) with lower < upper."""
  if not isinstance(value, (tuple, list)) or len(value) != 2:
    raise errors.InputError(f'{field}: {value!r} is not a pair of numbers')
  lower, upper = (_number(field, end) for end in value)
  if not lower < upper:
    raise errors.InputError(f'{field}: {value!r} is not (lower, upper)')
  return lower, upper


def _bind(field, table, settings, key='name', also=()):
  """The function that `settings[key]` names, with its numbers bound.

  The keyword-only parameters of the function are the fields it takes, those
  with a default are optional; None stands for an optional one left out.

  Args:
    field: where the settings stand, for the errors.
    table: name -> function.
    settings: the name and the numbers.
    key: which entry is the name.
    also: entries that are somebody else's.

  Returns:
    functools.partial of the function.
  """
  settings = _mapping(field, settings)
  _fields(field, settings, (key,), settings)
  function = _choose(f'{field}.{key}', table, settings[key])
  defaults = _keywords(function)
  required = [k for k, v in defaults.items() if v is inspect.Parameter.empty]
  _fields(field, settings, (key, *also, *required),
         [k for k in defaults if k not in required])
  bound = {}
  for name in defaults.keys() & settings.keys():
    value = settings[name]
    if value is None and name not in required:
      continue
    check = _pair if name == 'band' else _number
    bound[name] = check(f'{field}.{name}', value)
  return functools.partial(function, **bound)


def _keywords(function):
  """Keyword-only parameters -> defaults (inspect.Parameter.empty: none)."""
  parameters = inspect.signature(function).parameters.values()
  return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
