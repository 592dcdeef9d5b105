"""Choices: entries of the objective's tables, and how a row chooses of them.

    soft=choices.Choice(soft_clip, dict(tau=choices.POSITIVE))   of a table
    clip=dict(name='soft', tau=1.0)                              of a row

`read` checks every name, key and number of a row (configs/methods.py; a dict or
ConfigDict), and binds the numbers to the functions. Every error is an
errors.InputError: one line that names the field and lists what is allowed.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
import numbers
from typing import Any

from tepo_jax import errors


@dataclasses.dataclass(frozen=True)
class Range:
  """What a number must be: in words, and as a test that NaN fails.

  count: how many numbers the field has; the test takes them all.
  """
  meaning: str
  test: Callable[..., bool]
  count: int = 1

  def check(self, field: str, value: Any) -> Any:
    """The value as a float, or a tuple of `count`; else errors.InputError."""
    is_list = self.count > 1 and isinstance(value, (tuple, list))
    values: tuple[Any, ...] = tuple(value) if is_list else (value,)
    if (len(values) != self.count
        or not all(isinstance(x, numbers.Real) and not isinstance(x, bool)
                   for x in values) or not self.test(*values)):
      raise errors.InputError(f'{field}: {value!r} is not {self.meaning}')
    floats = tuple(map(float, values))
    return floats if is_list else floats[0]


FINITE = Range('a finite number', math.isfinite)
AMOUNT = Range('a finite number >= 0', lambda x: 0 <= x < math.inf)
POSITIVE = Range('a finite number > 0', lambda x: 0 < x < math.inf)
ABOVE_ONE = Range('a number > 1', lambda x: x > 1)
SHARE = Range('a number in (0, 1]', lambda x: 0 < x <= 1)
LOW = Range('a number in [0, 1] (or inf: no bound)',
            lambda x: 0 <= x <= 1 or x == math.inf)
HIGH = Range('a number >= 0 (inf: no bound)', lambda x: x >= 0)
WHOLE = Range('a whole number >= 0',
              lambda x: 0 <= x < math.inf and x == int(x))
BAND = Range('a pair (lower, upper) of numbers, lower < upper',
             lambda lower, upper: lower < upper, count=2)


@dataclasses.dataclass(frozen=True)
class Choice:
  """An entry of a table; one without numbers may be the function alone.

  ranges: of the function's numbers, which are keyword parameters. optional: of
    those with a default, which a row may leave out or set to None.
  whole_minibatch: the function compares the tokens of a minibatch.
  drop: of a clip, the choice of tokens that lose their surrogate; a row gives
    its numbers with those of the clip.
  """
  function: Callable
  ranges: Mapping[str, Range] = dataclasses.field(default_factory=dict)
  optional: Mapping[str, Range] = dataclasses.field(default_factory=dict)
  whole_minibatch: bool = False
  drop: 'Choice | None' = None

  def __call__(self, *arguments):
    return self.function(*arguments)

  def bind(self, values: Mapping[str, Any]) -> 'Choice':
    """This choice with those of the values bound that are its numbers."""
    own = {name: value for name, value in values.items()
           if name in self.ranges or name in self.optional}
    return dataclasses.replace(
        self, function=functools.partial(self.function, **own),
        drop=self.drop and self.drop.bind(values))


# Where the KL to a reference policy acts: added to the loss of each token, or
# taken from the reward before advantages are computed, each token's from its
# own (`advantage.of_tokens`).
PLACES = {'loss': None, 'reward': None}


@dataclasses.dataclass(frozen=True)
class Reference:
  """The KL to a reference policy: a copy of the policy, made at step 0 and,
  with a period, anew after every so many rollout steps.

  coef: its coefficient; 0: there is no reference policy.
  estimator: of `kl`. place: of PLACES.
  """
  coef: float
  estimator: Choice
  place: str
  period: int  # rollout steps; 0: it stays what it was at step 0

  @property
  def is_in_reward(self) -> bool:
    """Whether the KL is taken from the reward."""
    return self.coef != 0 and self.place == 'reward'


@dataclasses.dataclass(frozen=True)
class Method:
  """A row: its choices with their numbers bound, and its coefficients."""
  weight: Choice
  clip: Choice
  shape: Choice
  aggregate: Choice
  penalty: Choice
  region: Choice
  coef: float
  regularised: bool  # False if coef is 0 or the region is `none`
  delta_entropy: Choice
  entropy_tolerance: float  # nats: |dH| up to it counts as 0
  estimator: str  # a name of advantage.ESTIMATORS
  reference: Reference

  def compares_minibatch(self) -> bool:
    """Whether a choice that acts compares the tokens of a minibatch. Of a
    regulariser that is off only the metrics show where it would act."""
    choices = [self.clip, self.shape]
    if self.regularised:
      choices += [self.region, self.delta_entropy]
    return any(choice.whole_minibatch for choice in choices)


def read(row, tables):
  """The Method of a row.

  Args:
    row: mapping with weight, clip, shape, aggregate, reg, [estimator='grpo'],
      [reference], a mapping with [coef=0], [estimator='k3'], [place='loss'],
      [period=0];
      clip, shape and aggregate are mappings with a name and its numbers, or a
      name alone; reg is a mapping with penalty, region, coef, the region's
      numbers, [delta_entropy='exact'], [entropy_tolerance=0].
    tables: by field: name -> Choice or function.

  Raises:
    errors.InputError: the row is wrong.
  """
  row = {'estimator': 'grpo', 'reference': {}} | _mapping('method', row)
  _check_keys('method', row, ('weight', 'clip', 'shape', 'aggregate', 'reg'),
              ('estimator', 'reference'))
  reg = {'delta_entropy': 'exact', 'entropy_tolerance': 0.0} | _mapping(
      'method.reg', row['reg'])
  region = _bind('method.reg', tables['region'], reg, key='region', also=(
      'penalty', 'coef', 'delta_entropy', 'entropy_tolerance'))
  coef = FINITE.check('method.reg.coef', reg['coef'])
  _choose('method.estimator', tables['estimator'], row['estimator'])
  return Method(
      weight=_choose('method.weight', tables['weight'], row['weight']),
      **{field: _bind(f'method.{field}', tables[field], row[field])
         for field in ('clip', 'shape', 'aggregate')},
      **{field: _choose(f'method.reg.{field}', tables[field], reg[field])
         for field in ('penalty', 'delta_entropy')},
      region=region, coef=coef,
      regularised=coef != 0 and reg['region'] != 'none',
      entropy_tolerance=AMOUNT.check(
          'method.reg.entropy_tolerance', reg['entropy_tolerance']),
      estimator=row['estimator'],
      reference=_read_reference(row['reference'], tables['reference']))


def _read_reference(settings, estimators):
  """The Reference of a row."""
  defaults = {'coef': 0.0, 'estimator': 'k3', 'place': 'loss', 'period': 0}
  settings = defaults | _mapping('method.reference', settings)
  _check_keys('method.reference', settings, (), defaults)
  _choose('method.reference.place', PLACES, settings['place'])
  return Reference(
      coef=AMOUNT.check('method.reference.coef', settings['coef']),
      estimator=_choose('method.reference.estimator', estimators,
                        settings['estimator']),
      place=settings['place'], period=int(WHOLE.check(
          'method.reference.period', settings['period'])))


def _mapping(field, value):
  """The items of a dict or ConfigDict."""
  try:
    return dict(value.items())
  except AttributeError:
    raise errors.InputError(
        f'{field}: {value!r} is not a mapping of names to values') from None


def _check_keys(field, settings, required, optional=()):
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
  """The Choice of that name."""
  if not isinstance(name, str) or name not in table:
    raise errors.InputError(
        f'{field}: {name!r} is not one of {", ".join(table)}')
  entry = table[name]
  return entry if isinstance(entry, Choice) else Choice(entry)


def _bind(field, table, settings, key='name', also=()):
  """The Choice of `table` that `settings[key]` names, its numbers bound.

  settings may be the name alone. also: fields that are not numbers of it.
  """
  if isinstance(settings, str):
    choice, settings = _choose(field, table, settings), {key: settings}
  else:
    settings = _mapping(field, settings)
    _check_keys(field, settings, (key,), settings)
    choice = _choose(f'{field}.{key}', table, settings[key])
  ranges = {**choice.ranges, **(choice.drop.ranges if choice.drop else {})}
  _check_keys(field, settings, (key, *also, *ranges), choice.optional)
  ranges |= {name: allowed for name, allowed in choice.optional.items()
             if name in settings and settings[name] is not None}
  return choice.bind({name: allowed.check(f'{field}.{name}', settings[name])
                      for name, allowed in ranges.items()})
