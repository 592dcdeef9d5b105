r"""Looks at runs: one page with figures, tables, tokens and replays.

  python -m tepo_jax.report --runs=runs/a,runs/b --out=DIR \
      [--inspect=STEP] [--replay=STEP]

DIR/report.html needs no network; the figures lie beside it as PNG and SVG.
Finished, running and broken runs do. A pattern such as 'runs/study/*' stands
for the runs that it matches.

--inspect goes through a rollout step again and shows every sampled token with
its ratio, entropy, mask and the like. --replay evaluates every row of the
paper on that step's first and last minibatch. Both take the step's rollout and
the checkpoint of the step before it (step 1: the model), and name the steps
that have them where this one has not.
"""

import pathlib

from absl import flags

from configs import methods
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.analysis import runs as runs_lib
from tepo_jax.analysis import study
from tepo_jax.job import looking

_RUNS = flags.DEFINE_list(
    'runs', None, 'Folders of runs, by commas; patterns are expanded.',
    required=True)
_OUT = flags.DEFINE_string(
    'out', None, 'Folder for report.html and the figures.', required=True)
_INSPECT = flags.DEFINE_integer(
    'inspect', None, 'Rollout step to show token by token.', lower_bound=1)
_REPLAY = flags.DEFINE_integer(
    'replay', None, 'Rollout step to replay with every row.', lower_bound=1)


def main() -> None:
  runs = runs_lib.read(_RUNS.value)
  out = pathlib.Path(_OUT.value)
  try:
    out.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise errors.InputError(
        f'--out={out}: {error.strerror or error}') from error
  inspectors = looking.inspectors(runs, _INSPECT.value, out)
  replays = looking.replays(runs, _REPLAY.value, out, methods.paper)
  print(f'wrote {study.write(out, runs, methods.PANELS, inspectors, replays)}')


if __name__ == '__main__':
  cli.run(main)
