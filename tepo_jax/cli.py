"""The programs' common front door: flags, config, workdir, errors.

A program defines its flags at module level and ends with `cli.run(main)`:

  _CONFIG = cli.DEFINE_config()
  _WORKDIR = flags.DEFINE_string('workdir', None, 'Where ...', required=True)

  def main() -> None: ...

  if __name__ == '__main__':
    cli.run(main)

What the user got wrong is told in one line on stderr, with status 2.
"""

import collections
import difflib
import errno
import faulthandler
import glob
import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import math
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from absl import flags
from absl import logging as absl_logging
import ml_collections
from ml_collections import config_flags

from tepo_jax import errors
from tepo_jax import files

# Read when transformers is imported: it would advise to install PyTorch.
os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')

flags.disclaim_key_flags()  # flags defined here are the calling program's

# What may differ between an interrupted run and its continuation.
_CONTINUABLE = frozenset({'steps', 'compute.cache', 'profile.steps'})

# How a run is computed. What it computes is the same but for rounding: a
# continuation may change these too, and says so.
_EXECUTION = frozenset({
    'mesh.data', 'mesh.fsdp', 'mesh.tensor', 'rollout.slots', 'rollout.chunk',
    'train.microbatch_tokens', 'train.chunk_size', 'compute.attention',
    'compute.remat', 'compute.unroll', 'grading.workers'})

# A disk that is full, or fails.
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO,
                   errno.EROFS})

# What a run's memory on the devices grows with.
_MEMORY_FIELDS = (
    'in sampling, lower config.rollout.slots; in updates, '
    'config.train.microbatch_tokens or config.train.chunk_size, or set '
    'config.compute.remat=full')

_WANTED = {int: 'a whole number', float: 'a number', bool: 'true or false',
           tuple: "a tuple such as '(1, 2)'"}


def run(main: Callable[[], None]) -> None:
  """Parses the command line, calls `main`, and exits.

  Status 0 on success or --help, 2 with one line on stderr for bad input
  (flags, config, errors.InputError, a file without permission), 1 with one
  line when the run cannot go on (errors.RunError, a full disk, no device
  memory), 130 when interrupted from the keyboard; anything else is a defect
  and keeps its traceback.
  """
  program = _program_name()
  quiet()
  faulthandler.enable(sys.__stderr__)
  try:
    if _asks_for_help(sys.argv):
      print(_help(main))
      return
    _parse(sys.argv)
    main()
  except errors.InputError as error:
    print(f'{program}: error: {_one_line(error)}', file=sys.stderr)
    sys.exit(2)
  except PermissionError as error:
    print(f'{program}: error: {error.filename}: {error.strerror}',
          file=sys.stderr)
    sys.exit(2)
  except errors.RunError as error:
    print(f'{program}: error: {_one_line(error)}', file=sys.stderr)
    sys.exit(1)
  except KeyboardInterrupt:
    print(f'{program}: interrupted', file=sys.stderr)
    sys.exit(130)
  except Exception as error:
    reason = _no_defect(error)
    if reason is None:
      raise
    print(f'{program}: error: {reason}', file=sys.stderr)
    sys.exit(1)


def _no_defect(error: Exception) -> str | None:
  """What to say of an error that the machine is to blame for, else None."""
  if isinstance(error, OSError) and error.errno in _DISK:
    where = f'{error.filename}: ' if error.filename else ''
    return f'{where}{error.strerror}'
  if 'RESOURCE_EXHAUSTED' in str(error):  # jax's error, without importing jax
    return (f'out of device memory: {_one_line(error)[:800]}; '
            f'{_MEMORY_FIELDS}; `python -m tepo_jax.plan` says what fits')
  return None


def DEFINE_config() -> flags.FlagHolder:  # pylint: disable=invalid-name
  """The --config flag: FILE.py[:ARGUMENT], and --config.field=value."""
  return config_flags.DEFINE_config_file(
      'config', help_string='FILE.py or FILE.py:ARGUMENT, for example '
      'configs/tiny.py:tepo. A field is overridden by --config.FIELD=VALUE, '
      'for example --config.optimizer.learning_rate=1e-6.')


def load_config(spec: str) -> ml_collections.ConfigDict:
  """What get_config(ARGUMENT) of FILE.py returns, for FILE.py[:ARGUMENT].

  Raises:
    InputError: the file is missing or fails, or knows no such argument.
  """
  path, *argument = spec.split(':', 1)
  if not os.path.isfile(path):
    folder = os.path.dirname(path) or '.'
    near = difflib.get_close_matches(os.path.basename(path), (
        file.name for file in pathlib.Path(folder).glob('*.py')), 1)
    hint = f'; did you mean {os.path.join(folder, *near)}?' if near else ''
    raise errors.InputError(f'--config: no file {path}{hint}')
  loader = importlib.machinery.SourceFileLoader('run_config', path)
  module = importlib.util.module_from_spec(
      importlib.util.spec_from_loader('run_config', loader))
  try:
    loader.exec_module(module)
    config = module.get_config(*argument)
  except ValueError as error:
    raise errors.InputError(f'--config={spec}: {_one_line(error)}') from error
  except Exception as error:  # whatever the user's file may raise
    raise errors.InputError(
        f'--config={spec}: {_where(error, path)}{type(error).__name__}: '
        f'{_one_line(error)}') from error
  if not isinstance(config, ml_collections.ConfigDict):
    raise errors.InputError(f'--config={spec}: get_config gave no ConfigDict')
  return config


def overridden() -> list[str]:
  """Dotted names of the config fields given on the command line."""
  found = (re.match(r'--?(?:no)?config\.([^=]*)', a) for a in sys.argv[1:])
  return [match[1] for match in found if match]


def field_names(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """{'optimizer.learning_rate': 1e-6, ...}: dotted names of all the fields."""
  fields = {}
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      inner = field_names(value)
      fields |= {f'{name}.{key}': inner[key] for key in inner}
    else:
      fields[name] = value
  return fields


def config_digest(config: ml_collections.ConfigDict) -> str:
  """SHA-256 of the fields that make a run what it is, sorted.

  All of them but `_CONTINUABLE` and `_EXECUTION`: a run that goes on for
  longer, is traced, or goes on on another mesh is the same run.
  """
  fields = {name: value for name, value in field_names(config).items()
            if name not in _CONTINUABLE | _EXECUTION}
  return hashlib.sha256(
      json.dumps(fields, sort_keys=True).encode()).hexdigest()


def save_config(config: ml_collections.ConfigDict,
                workdir: str | os.PathLike) -> None:
  """Writes DIR/config.json: every field, sorted, replaced by rename.

  JSON has no infinity: it is the text 'Infinity', which `read_config` takes.
  """
  text = json.dumps(_for_json(config.to_dict()), indent=2, sort_keys=True,
                    allow_nan=False)
  files.replace_text(pathlib.Path(workdir) / 'config.json', text + '\n')


def read_config(workdir: str | os.PathLike) -> ml_collections.ConfigDict:
  """The config that a run saved in its workdir, locked.

  Raises:
    InputError: there is no DIR/config.json or it is not a JSON object.
  """
  path = pathlib.Path(workdir) / 'config.json'
  try:
    saved = json.loads(path.read_text('utf-8'))
  except FileNotFoundError as error:
    raise errors.InputError(
        f'{workdir} is not the workdir of a run: no config.json') from error
  except (OSError, ValueError) as error:
    raise errors.InputError(f'{path}: {error}') from error
  if not isinstance(saved, dict):
    raise errors.InputError(f'{path}: not a JSON object')
  return ml_collections.ConfigDict(_from_json(saved)).lock()


def claim_workdir(config: ml_collections.ConfigDict,
                  workdir: str | os.PathLike) -> None:
  """Makes DIR the workdir of this config, or checks that it is.

  Says on stderr how the run is computed now, where that has changed.

  Raises:
    InputError: DIR holds another config (the fields are named) or files that
      are no run's. Nothing in it is changed then.
  """
  workdir = pathlib.Path(workdir)
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    found = {entry.name for entry in workdir.iterdir()}
    if 'config.json' in found:
      _check_same_run(config, workdir)
    elif found - {'config.json.tmp'}:
      raise errors.InputError(
          f'--workdir={workdir}: holds {_some(sorted(found))} and no '
          'config.json, so it is not the folder of a run; choose another')
    save_config(config, workdir)
  except OSError as error:
    raise errors.InputError(
        f'--workdir={workdir}: {error.strerror or error}') from error


def new_folder(path: str) -> pathlib.Path:
  """A folder of that name that is to be made; nothing is made yet.

  Raises:
    InputError: it holds something already, or cannot be made.
  """
  folder = pathlib.Path(path)
  try:
    if folder.is_dir() and any(folder.iterdir()):
      raise errors.InputError(f'--out={path}: is there and not empty')
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not there.is_dir():
      raise errors.InputError(f'--out={path}: {there} is not a folder')
    if not os.access(there, os.W_OK):
      raise errors.InputError(f'--out={path}: no permission to write there')
  except OSError as error:
    raise errors.InputError(
        f'--out={path}: {error.strerror or error}') from error
  return folder


def quiet() -> None:
  """Keeps the libraries' chatter off the terminal.

  What libraries must say they raise. Orbax logs an error before it raises the
  same: hence FATAL. Our own rooms' log lines, such as how many rows of a data
  set were left out, go to stderr.
  """
  for name, value in {
      'TF_CPP_MIN_LOG_LEVEL': '2', 'TOKENIZERS_PARALLELISM': 'false',
      'HF_DATASETS_DISABLE_PROGRESS_BARS': '1'}.items():
    os.environ.setdefault(name, value)
  _leave_libtpu_alone()
  absl_logging.set_verbosity(absl_logging.FATAL)
  ours = logging.getLogger('tepo_jax')
  ours.setLevel(logging.INFO)
  if not ours.handlers:
    ours.addHandler(logging.StreamHandler())
  for handler in logging.root.handlers:  # some library's, by basicConfig
    if type(handler) is logging.StreamHandler:
      handler.addFilter(lambda record: not record.name.startswith('tepo_jax'))
  for name in ('jax', 'transformers', 'datasets', 'huggingface_hub', 'httpx',
               'fsspec', 'matplotlib'):
    logging.getLogger(name).setLevel(logging.ERROR)


def _leave_libtpu_alone() -> None:
  """Where libtpu is installed only as a compiler, jax looks for no TPU."""
  if ('JAX_PLATFORMS' in os.environ or glob.glob('/dev/accel*')
      or glob.glob('/dev/vfio/*') or not importlib.util.find_spec('libtpu')):
    return
  gpu = 'cuda,' if os.path.exists('/dev/nvidia0') else ''
  os.environ['JAX_PLATFORMS'] = f'{gpu}cpu'
  if 'jax' in sys.modules:  # it has read its environment
    sys.modules['jax'].config.update('jax_platforms', f'{gpu}cpu')


def _parse(argv: list[str]) -> None:
  spec = _config_spec(argv)
  config = None
  if spec is not None and 'config' in flags.FLAGS:
    config = load_config(spec)
    _check_overrides(argv, field_names(config))
  try:
    rest = flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as error:
    hint = _did_you_mean(error.flagname, _own_flags())
    raise errors.InputError(
        f'unknown flag --{error.flagname}{hint}') from error
  except (flags.Error, AttributeError, KeyError, OSError, TypeError, ValueError
          ) as error:  # the latter from config_flags
    raise errors.InputError(_flag_error(error, config)) from error
  if len(rest) > 1:
    raise errors.InputError(f'unexpected argument {rest[1]!r}')
  if 'config' in flags.FLAGS and flags.FLAGS['config'].value is None:
    raise errors.InputError('--config is required, for example '
                            '--config=configs/tiny.py:tepo')


def _config_spec(argv: list[str]) -> str | None:
  """The value of --config on the command line, in either of its forms."""
  for index, argument in enumerate(argv[1:], 1):
    if argument == '--':
      return None
    found = re.fullmatch(r'--?config(?:=(.*))?', argument)
    if found and found[1] is not None:
      return found[1]
    if found and index + 1 < len(argv):
      return argv[index + 1]
  return None


def _check_overrides(argv: list[str], fields: dict[str, Any]) -> None:
  """Refuses --config.NAME for a name that is no field."""
  for argument in argv[1:]:
    found = re.match(r'--?(?:no)?config\.([^=]*)', argument)
    if argument == '--':
      return
    if not found or found[1] in fields:
      continue
    inside = [name for name in fields if name.startswith(found[1] + '.')]
    if inside:
      raise errors.InputError(
          f'--config.{found[1]} is a section, not a field; it holds '
          f'{_some(inside)}')
    hint = _did_you_mean(found[1], fields, 'config.')
    raise errors.InputError(f'unknown field --config.{found[1]}{hint}')


def _flag_error(error: Exception,
                config: ml_collections.ConfigDict | None) -> str:
  """The parser's message in one line, saying what a config field wants."""
  text = _one_line(error)
  required = re.match(r'flag --(\S+)=None: Flag --\1 must have', text)
  if required:
    return f'--{required[1]} is required'
  found = re.match(r'flag (--config\.([^=\s]+)=.*?): ', text)
  if found and config is not None:
    section = config
    *sections, name = found[2].split('.')
    for part in sections:
      section = section[part]
    if section.get_type(name) in _WANTED:
      return f'{found[1]}: {_WANTED[section.get_type(name)]} is wanted'
  return text.removeprefix('flag ')


def _check_same_run(config: ml_collections.ConfigDict,
                    workdir: pathlib.Path) -> None:
  saved = field_names(read_config(workdir))
  # Through JSON, as the saved one: whatever that does to it.
  asked = field_names(ml_collections.ConfigDict(_from_json(
      json.loads(json.dumps(_for_json(config.to_dict()))))))
  differing = {
      name: f'{name} ({_shown(saved, name)} there, {_shown(asked, name)} here)'
      for name in sorted((saved.keys() | asked.keys()) - _CONTINUABLE)
      if _shown(saved, name) != _shown(asked, name)}
  other = [said for name, said in differing.items() if name not in _EXECUTION]
  if other:
    raise errors.InputError(
        f'--workdir={workdir} belongs to another config: {_some(other)}')
  if differing:
    print(f'{workdir} was computed otherwise, and rounds otherwise from here '
          f'on: {_some(list(differing.values()))}', file=sys.stderr, flush=True)


def _shown(fields: dict[str, Any], name: str) -> str:
  return repr(fields[name]) if name in fields else 'absent'


def _for_json(node: Any) -> Any:
  if isinstance(node, dict):
    return {key: _for_json(value) for key, value in node.items()}
  return 'Infinity' if node == math.inf else node


def _from_json(node: Any) -> Any:
  """JSON's lists as the tuples that configs hold; see `save_config`."""
  if isinstance(node, dict):
    return {key: _from_json(value) for key, value in node.items()}
  if isinstance(node, list):
    return tuple(map(_from_json, node))
  return math.inf if node == 'Infinity' else node


def _program_name() -> str:
  spec = sys.modules['__main__'].__spec__
  return spec.name if spec else pathlib.Path(sys.argv[0]).stem


def _own_flags() -> dict[str, flags.Flag]:
  """The program's own flags; not the hundreds of the imported libraries."""
  own = flags.FLAGS.get_key_flags_for_module('__main__')
  return {flag.name: flag for flag in own}


def _asks_for_help(argv: list[str]) -> bool:
  before = argv[1:argv.index('--')] if '--' in argv else argv[1:]
  return any(a in ('-h', '--help', '-help') for a in before)


def _help(main: Callable[[], None]) -> str:
  lines = [(sys.modules[main.__module__].__doc__ or '').strip(), '', 'Flags:']
  for name, flag in sorted(_own_flags().items()):
    default = '' if flag.default is None else f' (default: {flag.default})'
    lines.append(flags.text_wrap(
        f'--{name}: {flag.help}{default}', 79, '      ', '  '))
  return '\n'.join(lines)


def _where(error: Exception, path: str) -> str:
  lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
           if frame.filename == path]
  return f'line {lines[-1]}: ' if lines else ''


def _nearest(name: str, names: Iterable[str]) -> list[str]:
  """The most similar name; for a name without its section, in any section."""
  by_tail = collections.defaultdict(list)
  for candidate in names:
    by_tail[candidate.rpartition('.')[2]].append(candidate)
  section, _, tail = name.rpartition('.')
  tails = difflib.get_close_matches(tail, by_tail, 1)
  whole = difflib.get_close_matches(name, sum(by_tail.values(), []), 1)
  return whole if whole and section else sum((by_tail[t] for t in tails), [])


def _did_you_mean(name: str, names: Iterable[str], prefix: str = '') -> str:
  near = ' or '.join(f'--{prefix}{found}' for found in _nearest(name, names))
  return f'; did you mean {near}?' if near else ''


def _some(names: list[str]) -> str:
  """Up to six of them, and how many more."""
  more = f' and {len(names) - 6} more' if len(names) > 6 else ''
  return ', '.join(names[:6]) + more


def _one_line(error: BaseException) -> str:
  return ' '.join(str(error).split())
