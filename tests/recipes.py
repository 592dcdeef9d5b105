"""Carries out the recipes of configs/README.md in a copy of the code."""

import pathlib
import re
import shutil

from tests import runs


def section(title: str) -> str:
  """The text of a recipe."""
  text = (runs.ROOT / 'configs' / 'README.md').read_text('utf-8')
  return text.partition(f'## {title}\n')[2].partition('\n## ')[0]


def blocks(title: str, language: str) -> list[str]:
  """Its blocks of a language."""
  return [block for name, block in re.findall(
      r'^```(\w*)\n([\s\S]*?)^```$', section(title), re.M) if name == language]


def copy(folder: pathlib.Path, *names: str) -> pathlib.Path:
  """Copies these folders of the repository; returns `folder`."""
  for name in names:
    shutil.copytree(runs.ROOT / name, folder / name,
                    ignore=shutil.ignore_patterns('__pycache__'))
  return folder


def insert(path: pathlib.Path, block: str, *, after: str = '',
           before: str = '') -> None:
  """Inserts the block at the only place of a file where the text is."""
  text, place = path.read_text('utf-8'), after or before
  assert text.count(place) == 1, f'{path}: {place}'
  path.write_text(text.replace(
      place, place + block if after else block + place), 'utf-8')
