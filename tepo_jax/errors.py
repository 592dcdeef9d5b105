"""Exceptions that the programs turn into one line and an exit status, and forms
of such lines."""

from collections.abc import Iterator, Sequence
import contextlib
import re
import sys


class InputError(ValueError):
  """Bad input: a flag, config, file, model folder or checkpoint.

  The message is one line that says what is wrong and where. The programs
  print it on stderr and exit with status 2, without a traceback (`cli.run`).
  """


class Unanswered(InputError):
  """A service does not answer, such as a bucket: what was given may be right.

  The programs exit with status `LOST` (`is_unanswered`).
  """


class RunError(RuntimeError):
  """A run that started with valid input cannot continue.

  For example three non-finite gradients in a row. The programs print one line
  on stderr and exit with status 1, without a traceback; the last checkpoint
  stays.
  """


class Interrupted(Exception):
  """A signal stopped a program that has work left, which is saved.

  The programs say on stderr what is saved, and exit with status `INTERRUPTED`:
  whatever started them may start them again.
  """


class Lost(Exception):
  """Another process of the job is gone, or this machine's devices cannot be
  opened: a restart may help. The programs exit with status `LOST`."""


# jax's RuntimeError if another process holds the device, or it is broken; or if
# JAX_PLATFORMS names what does not exist.
_NO_BACKEND = 'Unable to initialize backend'
_UNKNOWN_BACKEND = 'is not in the list of known backends'

LOST = 3  # exit statuses, of Lost and Unanswered, and of Interrupted
INTERRUPTED = 42


def is_unanswered(error: BaseException) -> bool:
  """Whether an error is an Unanswered, or an InputError that came of one or of
  an HTTP answer that says to try again later (429, 5xx)."""
  cause = error if isinstance(error, InputError) else None
  while cause is not None:
    status = getattr(getattr(cause, 'response', None), 'status_code', None)
    if (isinstance(cause, Unanswered) or status == 429
        or 500 <= (status or 0) < 600):
      return True
    cause = cause.__cause__ or cause.__context__
  return False


def backend_status(text: str) -> int | None:
  """The exit status of an error's message that says that jax has no devices:
  that of bad input where a restart cannot help. None for other messages."""
  if _NO_BACKEND not in text:
    return None
  return 2 if _UNKNOWN_BACKEND in text else LOST


def one_line(error: BaseException) -> str:
  """The error's message without line breaks, as `printable`."""
  return printable(' '.join(str(error).split()))


# They move the cursor, change the colours or the title of a terminal, or the
# direction of text; half a surrogate pair cannot be printed at all.
_CONTROLS = re.compile(
    '[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e'
    '\u2066-\u2069\ud800-\udfff]')


def printable(text: str) -> str:
  """A text of a model, a data set or a library for a terminal or a page:
  control characters but newline and tab are escaped, as `\\x1b`."""
  return _CONTROLS.sub(
      lambda match: match[0].encode('unicode_escape').decode(), text)


def note(text: str) -> None:
  """Prints a line on stderr, as `printable`."""
  print(printable(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
  """Puts `what` before the message of an InputError, such as the field of a
  config whose value a lower package refuses."""
  try:
    yield
  except InputError as error:
    raise InputError(f'{what}: {error}') from error


def counted(count: int, noun: str) -> str:
  """'1 problem', '4,096 problems'."""
  return f'{count:,} {noun}{"" if count == 1 else "s"}'


def listed(names: Sequence[str], most: int = 6) -> str:
  """The first names, and the number of the others."""
  more = f' and {len(names) - most} more' if len(names) > most else ''
  return ', '.join(names[:most]) + more
