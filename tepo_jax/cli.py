"""The programs' command line: flags, configs, error messages, exit status.

A program defines its flags at module level, for example `_CONFIG =
cli.DEFINE_config()`, and ends with `cli.run(main)`, where main() -> None.
"""

from collections.abc import Callable, Iterable
import difflib
import faulthandler
import functools
import glob
import importlib.machinery
import importlib.util
import inspect
import logging
import operator
import os
import pathlib
import re
import sys
import traceback
from typing import Any

from absl import flags
from absl import logging as absl_logging
import ml_collections
from ml_collections import config_flags

from configs import fields as fields_lib
from tepo_jax import errors
from tepo_jax.job import configuration
from tepo_jax.job import exits
from tepo_jax.job import suggestions
from tepo_jax.runtime import interrupts
from tepo_jax.runtime import output

# Libraries read these when they are imported.
for _name, _value in {
    'TF_CPP_MIN_LOG_LEVEL': '2', 'TOKENIZERS_PARALLELISM': 'false',
    'HF_DATASETS_DISABLE_PROGRESS_BARS': '1',
    'HF_HUB_DISABLE_PROGRESS_BARS': '1',
    'TRANSFORMERS_VERBOSITY': 'error',  # else it suggests PyTorch
}.items():
  os.environ.setdefault(_name, _value)

flags.disclaim_key_flags()  # flags defined here are the calling program's

_BROKEN_PIPE = 141  # the status of a program that SIGPIPE ended, in a shell

_EXPECTED = {int: 'an integer', float: 'a number', bool: 'true or false',
             tuple: "a tuple such as '(1, 2)'"}


def run(main: Callable[[], None], joins_job: bool = False,
        takes_arguments: bool = False) -> None:
  """Parses the command line, calls `main`, and exits.

  Status 0 on success or --help; 2 with one line on stderr for bad input (flags,
  config, errors.InputError, a path without permission, with a loop of links,
  too long, or a folder in place of a file); 1 with one line if the run cannot
  continue (errors.RunError, a full disk, no device memory); 3 if a restart may
  help (errors.Lost, errors.Unanswered, a device that cannot be opened); 42 if
  SIGTERM stopped it with work left; 130 if interrupted; 141, quietly, if the
  reader of its output has gone. Anything else is a bug and keeps its traceback.

  Args:
    joins_job: whether the program joins the other processes of a job, as
      TEPO_MULTIHOST=1 asks; if not, it is refused then.
    takes_arguments: whether there may be `arguments` besides flags.
  """
  quiet()
  output.prepare()
  faulthandler.enable(sys.__stderr__)
  interrupts.install()
  interrupts.unwind_on_first()
  try:
    if _asks_for_help(sys.argv):
      print(_help(main))
    else:
      if not joins_job:
        refuse_job()
      _parse(sys.argv, takes_arguments)
      if joins_job:  # what trains or samples
        exits.check_address_space()
      main()
    sys.stdout.flush()
    if interrupts.happened():
      raise KeyboardInterrupt
  except BrokenPipeError:  # the reader of the output has gone
    output.close()
    sys.exit(_BROKEN_PIPE)
  except (Exception, KeyboardInterrupt) as error:
    output.close()
    expected = exits.outcome(error)
    if expected is None:
      raise
    status, message = expected
    errors.note(f'{_program_name()}: {message}')
    sys.exit(status)


def refuse_job() -> None:
  """For what one process does alone.

  Raises:
    errors.InputError: TEPO_MULTIHOST=1 asks for a job of several processes.
  """
  if os.environ.get('TEPO_MULTIHOST') == '1':
    raise errors.InputError(
        'TEPO_MULTIHOST=1: this program runs as one process; unset it and '
        'start one')


def DEFINE_config() -> flags.FlagHolder:  # pylint: disable=invalid-name
  """The --config flag: FILE.py[:ARGUMENT], and --config.field=value."""
  return config_flags.DEFINE_config_file(
      'config', help_string='FILE.py or FILE.py:ARGUMENT, for example '
      'configs/tiny.py:tepo. --config.FIELD=VALUE overrides a field, for '
      'example --config.optimizer.learning_rate=1e-6.')


def load_config(spec: str) -> ml_collections.ConfigDict:
  """Calls get_config(ARGUMENT) of FILE.py, for FILE.py[:ARGUMENT].

  Raises:
    InputError: the file is missing or fails, or rejects the argument.
  """
  path, *argument = spec.split(':', 1)
  if not os.path.isfile(path):
    folder = os.path.dirname(path) or '.'
    near = difflib.get_close_matches(os.path.basename(path), (
        file.name for file in pathlib.Path(folder).glob('*.py')), 1)
    hint = f'; did you mean {os.path.join(folder, *near)}?' if near else ''
    raise errors.InputError(f'--config: no file {path}{hint}')
  try:
    config = _executed(path).get_config(*argument)
  except ValueError as error:
    raise errors.InputError(
        f'--config={spec}: {errors.one_line(error)}') from error
  except Exception as error:  # the user's file may raise anything
    raise errors.InputError(
        f'--config={spec}: {_where(error, path)}{type(error).__name__}: '
        f'{errors.one_line(error)}') from error
  if not isinstance(config, ml_collections.ConfigDict):
    raise errors.InputError(
        f'--config={spec}: get_config did not return a ConfigDict')
  return config


def _executed(path):
  """The module of a config file."""
  loader = importlib.machinery.SourceFileLoader('run_config', path)
  module = importlib.util.module_from_spec(
      importlib.util.spec_from_loader('run_config', loader))
  loader.exec_module(module)
  return module


def caution(config: ml_collections.ConfigDict) -> str | None:
  """Why not to train this config, by caution(config, ARGUMENT) of --config's
  file; None: the file has no such function, or that found nothing."""
  path, *argument = (_config_spec(sys.argv) or '').split(':', 1)
  found = getattr(_executed(path), 'caution', None) if path else None
  return found and found(config, *argument)


def overridden() -> list[str]:
  """Dotted names of the config fields given on the command line."""
  found = (re.match(r'--?(?:no)?config\.([^=]*)', a)
           for a in _arguments(sys.argv))
  return [match[1] for match in found if match]


def _arguments(argv: list[str]) -> list[str]:
  """The arguments before `--`."""
  return argv[1:argv.index('--')] if '--' in argv else argv[1:]


def quiet() -> None:
  """Silences the libraries' log messages; their errors are exceptions anyway.

  FATAL, because Orbax logs errors that it also raises. This package's own log
  lines, such as the number of data set rows skipped, go to stderr.
  """
  _leave_libtpu_alone()
  sys.unraisablehook = _unraisable
  absl_logging.set_verbosity(absl_logging.FATAL)
  ours = logging.getLogger('tepo_jax')
  ours.setLevel(logging.INFO)
  ours.propagate = False  # to what a library's basicConfig has added
  if not ours.handlers:
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable())
    ours.addHandler(handler)
  if not logging.root.handlers:  # else a library's basicConfig adds one later
    logging.root.addHandler(logging.NullHandler())
  for name in ('jax', 'transformers', 'datasets', 'huggingface_hub', 'httpx',
               'fsspec', 'matplotlib'):
    logging.getLogger(name).setLevel(logging.ERROR)
  # gcsfs logs errors that it also raises; asyncio, each of a failed save's
  # tasks, where the checkpoint reports the save.
  for name in ('gcsfs', 'asyncio'):
    logging.getLogger(name).setLevel(logging.CRITICAL)


class _Printable(logging.Formatter):
  """Log lines name columns and values of data sets."""

  def format(self, record: logging.LogRecord) -> str:
    return errors.printable(super().format(record))


def _unraisable(found: Any) -> None:
  """Passes over what tensorstore, after a failed save, calls too late, and what
  Orbax's coroutines raise when they are lost: dozens of tracebacks of asyncio.
  The failure itself is reported by the checkpoint."""
  is_late = isinstance(found.exc_value, RuntimeError) and (
      str(found.exc_value) == 'Event loop is closed')
  is_lost = inspect.iscoroutine(found.object) and (
      'orbax' in found.object.cr_code.co_filename)
  if not is_late and not is_lost:
    sys.__unraisablehook__(found)


def _leave_libtpu_alone() -> None:
  """Keeps jax from looking for a TPU if libtpu is only here as a compiler."""
  if ('JAX_PLATFORMS' in os.environ or glob.glob('/dev/accel*')
      or glob.glob('/dev/vfio/*') or not importlib.util.find_spec('libtpu')):
    return
  gpu = 'cuda,' if os.path.exists('/dev/nvidia0') else ''
  os.environ['JAX_PLATFORMS'] = f'{gpu}cpu'
  if 'jax' in sys.modules:  # it has already read its environment
    sys.modules['jax'].config.update('jax_platforms', f'{gpu}cpu')


def arguments() -> tuple[str, ...]:
  """What the command line has besides flags."""
  return tuple(flags.FLAGS(sys.argv)[1:])


def _parse(argv: list[str], takes_arguments: bool) -> None:
  spec = _config_spec(argv)
  config = None
  if spec is not None and 'config' in flags.FLAGS:
    config = load_config(spec)
    _check_overrides(fields_lib.flat(config))
  try:
    rest = flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as error:
    hint = _did_you_mean(error.flagname, _own_flags())
    raise errors.InputError(f'unknown flag --{error.flagname}{hint}') from error
  except (flags.Error, AttributeError, KeyError, OSError, TypeError, ValueError
          ) as error:  # config_flags raises all of these
    raise errors.InputError(_flag_error(error, config)) from error
  if len(rest) > 1 and not takes_arguments:
    raise errors.InputError(f'unexpected argument {rest[1]!r}')
  if 'config' in flags.FLAGS and flags.FLAGS['config'].value is None:
    raise errors.InputError('--config is required, for example '
                            '--config=configs/tiny.py:tepo')


def _config_spec(argv: list[str]) -> str | None:
  """The value of --config on the command line, as --config=X or --config X."""
  for index, argument in enumerate(_arguments(argv), 1):
    found = re.fullmatch(r'--?config(?:=(.*))?', argument)
    if found and found[1] is not None:
      return found[1]
    if found and index + 1 < len(argv):
      return argv[index + 1]
  return None


def _check_overrides(fields: dict[str, Any]) -> None:
  """Refuses --config.NAME if there is no such field."""
  for name in overridden():
    if name in fields:
      continue
    inside = [field for field in fields if field.startswith(name + '.')]
    if inside:
      raise errors.InputError(
          f'--config.{name} is a section, not a field; its fields: '
          f'{errors.listed(inside)}')
    hint = _field_hint(name, fields)
    raise errors.InputError(f'unknown field --config.{name}{hint}')


def _field_hint(name: str, fields: Iterable[str]) -> str:
  """Suggests the field of the same meaning, or else of a like name."""
  if why := suggestions.absence(name):
    return f'; {why}'
  if same := suggestions.means(name, fields):
    return _did_you_mean_one_of(same, 'config.')
  return _did_you_mean(name, fields, 'config.')


def _flag_error(error: Exception,
                config: ml_collections.ConfigDict | None) -> str:
  """The parser's message in one line, with a config field's type."""
  text = errors.one_line(error)
  required = re.match(r'flag --(\S+)=None: Flag --\1 must have', text)
  if required:
    return f'--{required[1]} is required'
  found = re.match(r'flag (--config\.([^=\s]+)=.*?): ', text)
  if found and config is not None:
    *sections, name = found[2].split('.')
    section = functools.reduce(operator.getitem, sections, config)
    if section.get_type(name) in _EXPECTED:
      return f'{found[1]}: expected {_EXPECTED[section.get_type(name)]}'
  return text.removeprefix('flag ')


def _program_name() -> str:
  spec = sys.modules['__main__'].__spec__
  return spec.name if spec else pathlib.Path(sys.argv[0]).stem


def _own_flags() -> dict[str, flags.Flag]:
  """The program's own flags, without those of imported libraries."""
  own = flags.FLAGS.get_key_flags_for_module('__main__')
  return {flag.name: flag for flag in own}


def _asks_for_help(argv: list[str]) -> bool:
  return any(a in ('-h', '--help', '-help') for a in _arguments(argv))


def _help(main: Callable[[], None]) -> str:
  lines = [(sys.modules[main.__module__].__doc__ or '').strip(), '', 'Flags:']
  for name, flag in sorted(_own_flags().items()):
    default = '' if flag.default is None else f' (default: {flag.default})'
    lines.append(flags.text_wrap(
        f'--{name}: {flag.help}{default}', 79, '      ', '  '))
  if 'config' in _own_flags():
    lines += ['', configuration.help_text()]
  return '\n'.join(lines)


def _where(error: Exception, path: str) -> str:
  lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
           if frame.filename == path]
  return f'line {lines[-1]}: ' if lines else ''


def _did_you_mean(name: str, names: Iterable[str], prefix: str = '') -> str:
  """Suggests the most similar name; without a section, one of each section."""
  tails = {candidate: candidate.rpartition('.')[2] for candidate in names}
  section, _, tail = name.rpartition('.')
  found = difflib.get_close_matches(name, tails, 1) if section else []
  if not found:
    near = difflib.get_close_matches(tail, tails.values(), 1)
    found = [candidate for candidate, its in tails.items() if its in near]
  return _did_you_mean_one_of(found, prefix)


def _did_you_mean_one_of(names: Iterable[str], prefix: str) -> str:
  near = ' or '.join(f'--{prefix}{name}' for name in names)
  return f'; did you mean {near}?' if near else ''
