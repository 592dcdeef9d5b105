"""Files that are there whole or not at all."""

import os
import pathlib


def replace_text(path: pathlib.Path, text: str) -> None:
  """Writes `path` by rename: a crash leaves the old file or the new one."""
  temporary = path.with_name(path.name + '.tmp')
  temporary.write_text(text, 'utf-8')
  os.replace(temporary, path)
