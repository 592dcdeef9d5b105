"""Atomic file replacement."""

import os
import pathlib


def replace_text(path: pathlib.Path, text: str) -> None:
  """Writes `path` by rename: after a crash it is the old file or the new."""
  temporary = path.with_name(path.name + '.tmp')
  temporary.write_text(text, 'utf-8')
  os.replace(temporary, path)
