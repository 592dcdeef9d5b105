"""A program's stdout, whose disk may be full."""

import os
import sys

from tepo_jax.runtime import disk

_NAME = 'stdout'


def prepare() -> None:
  """Opens stdout if the caller closed it, as `>&-` does; puts its name into the
  errors of writing to it."""
  if sys.stdout is None:
    sys.stdout = open(os.devnull, 'w', encoding='utf-8')

  def named(method):
    def call(*arguments):
      with disk.naming(_NAME):
        return method(*arguments)
    return call

  for name in ('write', 'flush'):
    setattr(sys.stdout, name, named(getattr(sys.stdout, name)))


def failure(error: BaseException) -> str | None:
  """As `disk.failure`, of errors of writing to stdout; None for others."""
  if not isinstance(error, OSError) or error.filename != _NAME:
    return None
  return f'{_NAME}: {error.strerror}' + disk.free(
      error.strerror, os.path.realpath('/dev/stdout'))


def close() -> None:
  """Flushes stdout; drops what it cannot take: else the interpreter would try
  again at its end, and complain."""
  try:
    sys.stdout.flush()
  except OSError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
