"""The form of a table of fields, and the ranges of their values.

A table is a dict of fields, and of tables for its sections (base.py). All that
is known of a field is its `Field`: job/configuration.py derives the checks of a
config, what a resume may change, and --help from it.
"""

from collections.abc import Callable, Iterator
import dataclasses
import math
from typing import Any

import ml_collections
from ml_collections import config_dict


@dataclasses.dataclass(frozen=True)
class Range:
  """What a value must be: in words, and as a test. None, where it is allowed,
  is not tested."""
  words: str
  test: Callable[[Any], bool]


ANY = Range('', lambda x: True)
POSITIVE = Range('positive', lambda x: 0 < x < math.inf)
NOT_NEGATIVE = Range('0 or more', lambda x: 0 <= x < math.inf)
SHARE = Range('in [0, 1]', lambda x: 0 <= x <= 1)
POSITIVE_SHARE = Range('in (0, 1]', lambda x: 0 < x <= 1)
BELOW_ONE = Range('in [0, 1)', lambda x: 0 <= x < 1)
AT_LEAST_ONE = Range('at least 1', lambda x: x >= 1)


def one_of(*choices: str) -> Range:
  """One of these texts."""
  return Range(f'one of {", ".join(choices)}', lambda x: x in choices)


def some_of(*choices: str) -> Range:
  """A tuple of one or more of these texts."""
  return Range(f'a non-empty subset of {", ".join(choices)}',
               lambda x: len(x) > 0 and all(item in choices for item in x))


def up_to(most: int, least: int = 1) -> Range:
  """A number from `least` to `most`."""
  return Range(f'from {least} to {most}', lambda x: least <= x <= most)


# What a resume may do with a field.
SAME = ''  # nothing: the run belongs to another config
ROUNDING = 'a resume may change it; results then differ by rounding'
FREE = 'a resume may change it'


@dataclasses.dataclass(frozen=True)
class Field:
  """A field of a config.

  default: its value in base.py. If it is a type, the field is None until it is
    set to a value of that type.
  meaning: for the reader; ★ marks the fields that users change first.
  range: of its values.
  resume: SAME, ROUNDING or FREE.
  unless: (field, value): while that field has this value, this one has no
    effect, and setting it on the command line is an error.
  only_if: (field, value): the same while that field has another value.
  """
  default: Any
  meaning: str
  range: Range = ANY
  resume: str = SAME
  unless: tuple[str, Any] | None = None
  only_if: tuple[str, Any] | None = None

  @property
  def is_optional(self) -> bool:
    return isinstance(self.default, type)

  @property
  def type(self) -> type:
    return self.default if self.is_optional else type(self.default)


def unless(switch: str, value: Any, **fields: Field) -> dict[str, Field]:
  """A section whose other fields have no effect while `switch` is `value`."""
  return {
      name: field if switch.endswith(f'.{name}') else dataclasses.replace(
          field, unless=(switch, value)) for name, field in fields.items()}


def config(table: dict[str, Any]) -> ml_collections.ConfigDict:
  """A section, or a whole config, with the defaults of a table."""
  made = ml_collections.ConfigDict()
  for name, field in table.items():
    if isinstance(field, dict):
      made[name] = config(field)
    else:
      made[name] = (config_dict.placeholder(field.default)
                    if field.is_optional else field.default)
  return made


def flat(tree: Any) -> dict[str, Any]:
  """{'optimizer.learning_rate': 1e-6, ...}: the leaves of a table, a config or
  nested dicts, by dotted name."""
  return dict(_walk(tree, ''))


def _walk(tree, prefix) -> Iterator[tuple[str, Any]]:
  for name, value in tree.items():
    if isinstance(value, (dict, ml_collections.ConfigDict)):
      yield from _walk(value, f'{prefix}{name}.')
    else:
      yield prefix + name, value
