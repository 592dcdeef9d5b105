"""Every README names only what exists: files, programs, flags, fields, rows.

Checked are links, inline code and command blocks (fences without a language).
Other fences hold output, formulas or diagrams. Programs are parsed, not run.
"""

import ast
import functools
import glob
import pathlib
import re

import pytest

from configs import base
from configs import fields as fields_lib
from configs import methods
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import configuration

ROOT = pathlib.Path(__file__).resolve().parents[1]
_SOURCES = ('tepo_jax', 'configs', 'launch', 'tests')
PAGES = [ROOT / 'README.md', *sorted(
    page for name in _SOURCES for page in (ROOT / name).rglob('README.md')
    if '.pytest_cache' not in page.parts), *(
        ROOT / 'launch' / name
        for name in ('CONTAINERS.md', 'PLANS.md', 'RUNS.md'))]

# What programs write, not what the repository holds.
_OUTPUTS = ('runs/', 'bucket/', 'checkpoints/', 'rollouts/', 'tensorboard/',
            'base_model/', 'profile/', 'DIR/', 'OUT/')
_FILE = re.compile(r'[\w./*-]+\.(?:py|sh|md|svg|txt|ini)')
_FOLDER = re.compile(r'(?:[\w.-]+/)+')
_NAME = re.compile(r'[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?')
_FLAG = re.compile(r'(?<![\w-])--([a-z][\w-]*)(?!\.)\b')
_OVERRIDE = re.compile(r'--config\.([\w.]+)(?:=("[^"]*"|\S+))?')
_SPEC = re.compile(r'configs/\w+\.py:[\w.,-]+')


def _problems(page: pathlib.Path, text: str) -> list[str]:
  """What is wrong with a page; empty if nothing is."""
  fences = re.findall(r'^```(.*)\n([\s\S]*?)^```$', text, re.M)
  prose = re.sub(r'^```[\s\S]*?^```$', '', text, flags=re.M)
  inline = [' '.join(code.split()) for code in re.findall(r'`([^`]+)`', prose)]
  commands = [line for language, block in fences if not language.strip()
              for line in block.replace('\\\n', ' ').splitlines()]
  found = [*_bad_links(page, prose)]
  for code in inline:
    found += _bad_inline(page, code)
  for line in commands + inline:
    found += _bad_command(page, line.replace('[', ' ').replace(']', ' '))
  return found


def _bad_links(page, prose):
  for target, anchor in re.findall(
      r'\]\(((?!\w+:)[^)#\s]*)(?:#([^)\s]+))?\)', prose):
    path = page.parent / target if target else page
    if not path.exists():
      yield f'link to {target}: no such file'
    elif anchor and anchor not in _anchors(path.read_text('utf-8')):
      yield f'link to {target}#{anchor}: no such heading'


def _anchors(text):
  titles = re.findall(r'^#+ (.+)$', text, re.M)
  return {re.sub(r'[^\w -]', '', t.lower()).replace(' ', '-') for t in titles}


def _bad_inline(page, code):
  """Wrong names in a piece of inline code that is no command."""
  path = code.split(':')[0]
  field, equals, value = code.removeprefix('config.').partition('=')
  if _FILE.fullmatch(path) or _FOLDER.fullmatch(path):
    if not _exists(page, path):
      yield f'{path}: no such file or folder'
  elif field.split('.')[0] in _sections() and '.' in field and (
      _NAME.fullmatch(field)):
    yield from _bad_field('configs/base.py:tepo', field, value)
  elif code.startswith('--'):
    for flag in _FLAG.findall(code):
      if not any(flag in flags for flags in _flags().values()) and (
          f'--{flag}' not in _scripts()):
        yield f'--{flag}: no program or script has it'
  elif _NAME.fullmatch(code) and not _is_in_sources(code):
    yield f'{code}: not in the sources'


def _exists(page, path):
  if path.startswith(_OUTPUTS) or path.isupper() or path.startswith('FILE'):
    return True
  if path.endswith('.py') and '/' not in path:
    return any(path == file.name for file in _python())
  return any(glob.glob(str(folder / path)) for folder in (
      page.parent, ROOT, ROOT / 'tepo_jax'))


def _bad_command(page, line):
  """Wrong programs, scripts, paths, flags, fields and rows of a line."""
  specs = _SPEC.findall(line)
  for spec in specs:
    try:
      cli.load_config(spec)
    except errors.InputError as error:
      yield str(error)
  for field, value in _OVERRIDE.findall(line):
    yield from _bad_field(
        specs[0] if specs else 'configs/base.py:tepo', field, value)
  for module, rest in re.findall(r'-m ([a-z]\w*\.[\w.]+)(.*)', line):
    if module not in _flags():
      yield f'{module}: no such program'
    else:
      yield from (f'{module} has no flag --{flag}'
                  for flag in _FLAG.findall(rest)
                  if flag not in _flags()[module])
  for before, script, rest in re.findall(
      r'^(.*?)(launch/\w+\.sh)(.*)$', line):
    yield from _bad_script(before, script, rest)
  for word in line.split():
    path = word.split(':')[0].strip('\'"')
    if path.startswith(tuple(f'{s}/' for s in _SOURCES)) and not _exists(
        page, path.rstrip('.,;)…')):
      yield f'{path}: no such file or folder'


def _bad_script(before, script, rest):
  """Wrong variables, sub-commands and flags of a launch script."""
  if not (ROOT / script).exists():
    yield f'{script}: no such script'
    return
  text = (ROOT / script).read_text('utf-8')
  for variable in re.findall(r'\b([A-Z][A-Z_]+)=', before):
    if not re.search(rf'\b{variable}\b', text):
      yield f'{script} reads no {variable}'
  allowed = _flags()['tepo_jax.train'] if 'tepo_jax.train' in text else set()
  for flag in _FLAG.findall(rest):
    if f'--{flag}' not in text and flag not in allowed:
      yield f'{script} has no flag --{flag}'
  words = [w for w in rest.split('#')[0].split() if not w.startswith('-')]
  known = {word for group in re.findall(r'[\w-]+(?:\|[\w-]+)+', text)
           for word in group.split('|')}
  known |= set(re.findall(rf'{script} (\w+)', text))
  if words and re.fullmatch('[a-z][a-z0-9_]*', words[0]) and (
      words[0] not in known):
    yield f'{script} has no sub-command {words[0]}'


def _bad_field(spec, field, value):
  """Whether the config has the field, and takes the value if one is given."""
  config = cli.load_config(spec)
  fields = fields_lib.flat(config)
  if field.split('.')[-1] in ('field', 'FIELD') or any(
      name.startswith(f'{field}.') for name in fields):
    return  # a placeholder, or a section
  if field not in fields:
    yield f'config.{field}: no such field of {spec}'
  elif value and not re.search(r'…|\b[A-Z]{2,}', value):
    *sections, name = field.split('.')
    kind = functools.reduce(
        lambda part, section: part[section], sections, config).get_type(name)
    value = value.strip('"\'')
    try:
      config.update_from_flattened_dict({
          field: ast.literal_eval(value) if kind in (tuple, bool)
          else kind(value)})
      configuration.check_values(config)
    except (errors.InputError, SyntaxError, TypeError, ValueError) as error:
      yield f'config.{field}={value}: {error}'


@functools.cache
def _sections():
  return set(base.get_config())


@functools.cache
def _flags() -> dict[str, set[str]]:
  """Module -> the flags of each program, from its source."""
  flags = {}
  for path in [*(ROOT / 'tepo_jax').glob('*.py'),
               *(ROOT / 'tests').rglob('*.py')]:
    text = path.read_text('utf-8')
    if "__name__ == '__main__'" not in text:
      continue
    calls = [node for node in ast.walk(ast.parse(text))
             if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Attribute)]
    names = {call.args[0].value.removeprefix('--') for call in calls
             if call.args and isinstance(call.args[0], ast.Constant)
             and re.match('DEFINE_|add_argument', call.func.attr)}
    if any(call.func.attr == 'DEFINE_config' for call in calls):
      names.add('config')
    module = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    flags[module] = names | {'help'}
  return flags


@functools.cache
def _scripts():
  return '\n'.join(p.read_text('utf-8') for p in (ROOT / 'launch').glob('*.sh'))


@functools.cache
def _python():
  return [p for name in _SOURCES for p in (ROOT / name).rglob('*.py')]


@functools.cache
def _words():
  """The words of each source file, by its name without suffix."""
  return [(path.stem, set(re.findall(r'\w+', path.read_text('utf-8'))))
          for path in _python() if path != pathlib.Path(__file__)
          ] + [('', set(re.findall(r'\w+', _scripts()))),
               ('', set(methods.methods(1e-3)))]


def _is_in_sources(code):
  """`name` anywhere; `module.name` in that module, `Class.name` in one file."""
  first, *rest = code.removesuffix('()').split('.')
  return any(set(rest) <= words and (first in words or first == stem)
             for stem, words in _words())


@pytest.mark.parametrize(
    'page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_exist(page):
  assert not _problems(page, page.read_text('utf-8'))


def test_every_method_has_its_line():
  text = (ROOT / 'configs' / 'README.md').read_text('utf-8')
  section = text.partition('## Methods')[2].partition('\n## ')[0]
  names = [name for line in section.splitlines() if line.startswith('| `')
           for name in re.findall('`([^`]+)`', line.split('|')[1])]
  assert sorted(names) == sorted(methods.methods(1e-3))


@pytest.mark.parametrize('text, message', [
    ('[x](nowhere.md)', 'link to nowhere.md'),
    ('[x](README.md#no-such-part)', 'no such heading'),
    ('`learning/objectives.py`', 'objectives.py: no such file'),
    ('`tepo_jax/learn/`', 'no such file or folder'),
    ('`rollout.samplez`', 'config.rollout.samplez: no such field'),
    ('`train.packing=buckles`', 'train.packing=buckles'),
    ('`eval.period=-1`', 'config.eval.period=-1'),
    ('`--inspekt=STEP`', '--inspekt: no program'),
    ('`objective.no_such_name`', 'objective.no_such_name: not in the sources'),
    ('```\npython -m tepo_jax.trian --config=configs/tiny.py\n```',
     'tepo_jax.trian: no such program'),
    ('```\npython -m tepo_jax.export \\\n  --workdirs=DIR\n```',
     'tepo_jax.export has no flag --workdirs'),
    ('```\npython -m tepo_jax.train --config=configs/tiny.py:tepoo\n```',
     "unknown method 'tepoo'"),
    ('```\nx --config=configs/tiny.py:grpo --config.method.reg.nope=1\n```',
     'config.method.reg.nope: no such field'),
    ('```\nlaunch/tpu_vm.sh destroy\n```', 'has no sub-command destroy'),
    ('```\nMETHODZ=tepo launch/sweep.sh tiny\n```', 'reads no METHODZ'),
    ('```\nlaunch/sweep.sh --dryrun table3\n```', 'has no flag --dryrun'),
    ('```\nlaunch/cloud.sh\n```', 'launch/cloud.sh: no such script'),
    ('```\npython -m pytest tests/grading/test_gold.py\n```',
     'tests/grading/test_gold.py: no such file'),
])
def test_a_wrong_name_is_found(text, message):
  assert message in '\n'.join(_problems(ROOT / 'README.md', text))
