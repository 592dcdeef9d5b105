"""The first part of a single run's page: what was run."""

import math
import re
import shlex

from configs import base
from configs import fields as fields_lib
from tepo_jax.job import description
from tepo_jax.runtime import progress
from tepo_jax.tools.report import page
from tepo_jax.tools.report import runs as runs_lib

_UNKNOWN = '–'
_VERSIONS = 'python', 'jax', 'flax', 'optax', 'transformers'


def header(run: runs_lib.Run, seconds: float) -> str:
  """Returns what was run, and the command that makes it again.

  seconds: of its steps and evaluations.
  """
  start = run.starts[-1] if run.starts else {}
  arguments = _normalised(shlex.split(next(
      (begun['command'] for begun in run.starts if 'command' in begun), '')))
  facts = {'state': run.state}
  if run.parent is not None:
    facts['a fork of'] = f'{run.parent.run} after step {run.parent.step}'
  if run.fields is not None:
    facts |= _what(run.fields, start) | _changes(run.fields, arguments)
  facts |= {
      'machine': ', '.join(str(start[name]) for name in (
          'devices', 'system') if name in start) or _UNKNOWN,
      'duration': progress.duration(seconds),
      'versions': ', '.join([f'commit {start.get("commit", _UNKNOWN)}', *(
          f'{name} {start[name]}' for name in _VERSIONS if name in start)]),
      'make it again': page.Html(f'<code>{_command(arguments)}</code>'
                                 ) if arguments else _UNKNOWN}
  return page.facts(facts.items())


def _what(fields, start):
  parameters = start.get('parameters')
  count = '' if parameters is None else f', {parameters:,} parameters'
  formula = ''.join(
      f'<br>{page.text(part)}: {page.text(choice)}: {page.text(text)}'
      for part, choice, text in description.formula(fields))
  return {
      'model': f'{fields.get("model") or "embedded"}{count}',
      'method': page.Html(f'{page.text(fields["method_name"])}: '
                          f'{page.text(description.equation(fields))}{formula}'),
      'first fields': _listed({
          name: value for name, value in description.first_fields(
              fields).items() if name != 'model'}),
      'seed': fields['seed']}


def _normalised(arguments):
  """The arguments of a run, each as --flag=value.

  Its command has nothing but flags, so what does not look like a flag is the
  value of the one before it. A boolean field of the config may be a bare
  --config.FIELD or --noconfig.FIELD: these become True and False.
  """
  joined = []
  for argument in arguments:
    if joined and '=' not in joined[-1] and not re.match(
        '--?([a-zA-Z]|$)', argument):
      joined[-1] += f'={argument}'
    else:
      joined.append(argument)
  return [re.sub(r'^--?(no)?config\.([^=]+)$',
                 lambda found: f'--config.{found[2]}={not found[1]}', argument)
          for argument in joined]


def _changes(fields, arguments):
  """The fields that differ from the config file, where the command is known;
  else from base.py."""
  config = [a.partition('=')[2] for a in arguments if re.match('--?config=', a)]
  if config:
    found = dict(
        a.partition('config.')[2].partition('=')[::2] for a in arguments
        if re.match(r'--?config\.', a))
    return {'config file': config[-1],
            'changed on the command line': _listed(found) or 'nothing'}
  try:
    defaults = fields_lib.flat(base.get_config(fields['method_name']))
  except ValueError:  # no row of today's methods.py
    return {}
  return {'differs from configs/base.py': _listed({
      name: value for name, value in fields.items()
      if name in defaults and value != _as_saved(defaults[name])}) or 'nothing'}


def _as_saved(value):
  if value == math.inf:
    return 'Infinity'
  return list(value) if isinstance(value, tuple) else value


def _listed(fields):
  return ', '.join(f'{name}={value}' for name, value in fields.items())


def _command(arguments):
  """The command, with another folder: a run's own is taken. Its words are
  elements, since a browser would break lines after the hyphens of a flag."""
  again = [re.sub(r'^(--?workdir)=.*', r'\1=DIR', a) for a in arguments]
  return ' '.join(['python -m tepo_jax.train', *(
      f'<span>{page.text(shlex.quote(a))}</span>' for a in again)])
