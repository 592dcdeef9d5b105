"""Exceptions that the programs turn into one line and an exit status."""


class InputError(ValueError):
  """Bad input from outside: a flag, config, file, model folder or checkpoint.

  The message is one line that says what is wrong and where. The programs
  print it on stderr and exit with status 2, without a traceback (`cli.run`).
  """


class RunError(RuntimeError):
  """The run cannot go on, through no fault of its input's form.

  Three gradients in a row that are not finite, a pass rate of 0: one line on
  stderr, status 1, no traceback; the last checkpoint stays.
  """
