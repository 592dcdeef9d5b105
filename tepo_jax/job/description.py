"""What a run trains, in words: its method's formula, and the fields that users
change first. Model cards and reports show them."""

from collections.abc import Mapping
from typing import Any

from tepo_jax.job import configuration
from tepo_jax.learning import advantage
from tepo_jax.learning import kl
from tepo_jax.learning import objective

# Numbers of a section that belong to no entry of its table.
_SHARED = {'reg.penalty': ('coef',),
           'reference.estimator': ('coef', 'place', 'period')}

_PARTS = (
    ('weight', objective.WEIGHTS), ('clip', objective.CLIPS),
    ('shape', objective.SHAPES), ('aggregate', objective.AGGREGATES),
    ('reg.penalty', objective.PENALTIES), ('reg.region', objective.REGIONS),
    ('estimator', advantage.ESTIMATORS),
    ('reference.estimator', kl.ESTIMATORS))


def equation(fields: Mapping[str, Any]) -> str:
  """The loss of a method, in the symbols of learning/objective.py.

  fields: of a config, by dotted name.
  """
  reference = (' + beta K_it' if _has_reference(fields)
               and fields.get('method.reference.place') == 'loss' else '')
  return f'L = sum_it c_it (coef M_it R_it - b_it S(w_it, A_it){reference})'


def formula(fields: Mapping[str, Any]) -> list[tuple[str, str, str]]:
  """The parts of a method: (part, its choice with the numbers, its formula).

  fields: of a config, by dotted name. A part that is off is left out. The
  formulas are those of learning/objective.py, which also defines the symbols.
  """
  found = []
  for part, table in _PARTS:
    name = fields.get(f'method.{part}', fields.get(f'method.{part}.name'))
    choice = table.get(name)
    if choice is None or (name == 'none' and part != 'weight'):
      continue
    if part == 'reference.estimator' and not _has_reference(fields):
      continue
    function = getattr(choice, 'function', choice)
    found.append((part, name + _numbers(fields, part, choice),
                  (function.__doc__ or '').split('\n')[0]))
  return found


def _has_reference(fields):
  return bool(fields.get('method.reference.coef'))


def _numbers(fields, part, choice):
  """' (low=0.2, high=0.28)': the numbers of a choice in the fields."""
  drop = getattr(choice, 'drop', None)
  names = (*getattr(choice, 'ranges', ()), *getattr(choice, 'optional', ()),
           *(drop.ranges if drop else ()))
  section = f'method.{part.rpartition(".")[0] or part}'
  numbers = {name: fields.get(f'{section}.{name}')
             for name in (*names, *_SHARED.get(part, ()))}
  shown = [f'{name}={value}' for name, value in numbers.items()
           if value is not None]
  return f' ({", ".join(shown)})' if shown else ''


def data(fields: Mapping[str, Any]) -> str:
  """The data of a run: data.name, or its sets with their weights; '–' if
  unknown."""
  sets = fields.get('data.sets') or ()
  return '; '.join(f'{name} × {weight}' for name, weight, *_ in sets) or str(
      fields.get('data.name', '–'))


def first_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
  """The values of the fields that users change first (★ in base.py)."""
  found = {name: fields[name] for name, field in configuration.FIELDS.items()
           if field.meaning.startswith('★') and name in fields}
  if fields.get('data.sets'):
    found['data.name'] = data(fields)
  return found
