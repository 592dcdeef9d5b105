"""A program's stdout, which may be closed or on a full disk."""

import os
import sys


def prepare() -> None:
  """Opens stdout if the caller closed it, as `>&-` does."""
  if sys.stdout is None:
    sys.stdout = open(os.devnull, 'w', encoding='utf-8')


def close() -> None:
  """Flushes stdout; drops what it cannot take: else the interpreter would try
  again at its end, and complain."""
  try:
    sys.stdout.flush()
  except OSError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
