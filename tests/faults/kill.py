r"""Kills training runs repeatedly; their results must not change.

  python -m tests.faults.kill --kills=50 [--seed=0] [--interrupts] [--carry]

Repeats one command of tiny training and sends SIGKILL, or sometimes SIGTERM, at
random moments, until --kills signals are sent; with --interrupts, SIGINT, and
half of the runs compile everything again; with --carry, completions are carried
over rollout steps. Each run that finishes is compared with an uninterrupted
run, file by file and bit by bit. After SIGTERM the process must exit with
status 42 within 30 seconds, after SIGINT with status 130 within 120 seconds,
without a traceback. Exits with 1 if a run differs.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from tests import runs


def fingerprint(workdir: pathlib.Path) -> dict[str, str]:
  """The contents of a run's folder, without times and TensorBoard's events.

  The last two checkpoints are compared by the digests of their arrays
  (parameters, moments) and by their notes. A run that was stopped in an
  evaluation saves the metrics that it has not written, `unrecorded`, and no
  score; on the scores depends which earlier checkpoint is kept as the best.
  """
  left = {'metrics': json.dumps([
      runs.untimed(record) for record in runs.records(workdir)])}
  for path in sorted(workdir.rglob('*')):
    inside = path.relative_to(workdir)
    if path.is_file() and inside.parts[0] in ('config.json', 'rollouts'):
      left[str(inside)] = path.read_text()
  steps = sorted(int(path.parts[-3]) for path in workdir.glob(
      'checkpoints/*/extra/metadata'))
  for step in steps[-2:]:
    saved = json.loads(
        (workdir / f'checkpoints/{step}/extra/metadata').read_text())
    del saved['extra']['unrecorded']
    left[f'checkpoints/{step}'] = json.dumps(saved)
  return left


# Fields of a run in which completions are in flight after every step.
CARRY = ('--config.rollout.carry.max_versions=2', '--config.rollout.slots=8',
         '--config.rollout.chunk=4', '--config.train.behaviour.weight=token')


def start(model: pathlib.Path, workdir: pathlib.Path, compiles: bool = False,
          fields: tuple[str, ...] = ()) -> subprocess.Popen:
  environment = runs.environment()
  if compiles:
    environment['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
  return subprocess.Popen(
      runs.command('train', *runs.train_arguments(model, workdir), *fields),
      cwd=runs.ROOT, env=environment,
      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def moment(rng: random.Random, longest: float, interrupts: bool):
  """Draws a signal and when to send it: after a time, or during a save.

  Returns:
    (its name, the signal, (seconds since the start, workdir) -> bool).
  """
  sent = signal.SIGTERM if rng.random() < 0.25 else signal.SIGKILL
  if interrupts:
    sent = signal.SIGINT
  if rng.random() < 0.3:
    left = None  # unfinished saves of killed runs

    def saving(_, workdir):
      nonlocal left
      found = half_saved(workdir)
      left = found if left is None else left & found
      return bool(found - left)

    return f'{sent.name} while saving', sent, saving
  delay = rng.uniform(0, longest)
  return (f'{sent.name} after {delay:.1f} s', sent,
          lambda seconds, _: seconds >= delay)


def half_saved(workdir: pathlib.Path) -> set[pathlib.Path]:
  return set((workdir / 'checkpoints').glob('*.orbax-checkpoint-tmp*'))


def run_until(process, workdir, sent, condition) -> tuple[float, str] | None:
  """Sends the signal once the condition holds.

  Returns:
    (seconds from the signal to the exit, the run's phase); None if it exited
    by itself before.
  """
  begin, interrupted_in = time.monotonic(), None
  while process.poll() is None:
    if condition(time.monotonic() - begin, workdir):
      interrupted_in = phase(workdir, b'any')
      process.send_signal(sent)
      break
    time.sleep(0.01)
  was_sent, begin = process.poll() is None, time.monotonic()
  # It may be compiling.
  _, stderr = process.communicate(timeout=120 if was_sent else None)
  if process.returncode not in (0, -sent, 130 if sent == signal.SIGINT else 42):
    raise RuntimeError(stderr.decode()[-2000:])
  if sent == signal.SIGINT and was_sent:
    check_interrupted(process.returncode, stderr.decode())
    return time.monotonic() - begin, interrupted_in
  if was_sent:
    return time.monotonic() - begin, phase(workdir, stderr)
  return None


def check_interrupted(status: int, stderr: str) -> None:
  """Raises unless an interrupted run ended as promised.

  Before the interpreter has imported this package, the signal itself ends the
  process, which shells report as 130 too.
  """
  if status == 130 and 'Traceback' not in stderr and 'interrupted' in stderr:
    return
  if status == -signal.SIGINT and 'tepo_jax/train.py' not in stderr:
    return
  raise RuntimeError(f'status {status}: {stderr[-2000:]}')


def phase(workdir: pathlib.Path, stderr: bytes) -> str:
  """The phase of a killed run, by its files; after SIGTERM, at its exit."""
  if not stderr:
    return 'starting'
  if half_saved(workdir):
    return 'saving'
  if not (workdir / 'metrics.jsonl').exists():
    return 'loading'
  lines = (workdir / 'metrics.jsonl').read_bytes().count(b'\n')  # from step 0
  dumped = len(list((workdir / 'rollouts').glob('step_*')))
  return 'updating' if dumped >= max(lines, 1) else 'sampling'


def undisturbed(model: pathlib.Path, folder: pathlib.Path,
                fields: tuple[str, ...] = ()) -> dict[bool, float]:
  """Makes the run folder/alone with further fields; returns the seconds of a
  run, by whether it compiles."""
  longest = {}
  for name in ('compiling', 'alone'):  # the second compiles nothing
    begin = time.monotonic()
    run_until(start(model, folder / name, fields=fields), folder,
              signal.SIGKILL, lambda *_: False)
    longest[name == 'compiling'] = time.monotonic() - begin
  return longest


def kill_and_compare(model: pathlib.Path, folder: pathlib.Path,
                     longest: dict[bool, float], kills: int, seed: int,
                     interrupts: bool = False,
                     fields: tuple[str, ...] = ()) -> list[str]:
  """Names of the files that differ from those of folder/alone.

  longest, fields: of `undisturbed`.
  """
  expected = fingerprint(folder / 'alone')
  rng, done, runs_finished, differing = random.Random(seed), 0, 0, []
  phases, longest_end = collections.Counter(), 0.0
  while done < kills or not runs_finished:
    workdir = folder / f'killed_{seed}_{runs_finished}'
    compiles = interrupts and rng.random() < 0.5
    name, sent, condition = moment(rng, longest[compiles], interrupts)
    if done >= kills:
      condition = lambda *_: False
    ended = run_until(start(model, workdir, compiles, fields), workdir, sent,
                      condition)
    if ended:
      done += 1
      phases[ended[1]] += 1
      if sent != signal.SIGKILL:
        longest_end = max(longest_end, ended[0])
      print(f'kill {done}/{kills}: {name}, {ended[1]}, exited after '
            f'{ended[0]:.1f} s', flush=True)
      continue
    runs_finished += 1
    found = fingerprint(workdir)
    differing += [f'{workdir.name}/{name}'
                  for name in sorted(expected.keys() | found.keys())
                  if expected.get(name) != found.get(name)]
    print(f'run {runs_finished} after {done} kills: '
          f'{"differs" if differing else "equal"}', flush=True)
  print(f'{dict(phases)}; after SIGTERM or SIGINT at most {longest_end:.1f} s')
  return differing


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument('--kills', type=int, default=50)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--interrupts', action='store_true')
  parser.add_argument('--carry', action='store_true')
  settings = parser.parse_args()
  fields = CARRY if settings.carry else ()
  os.environ['JAX_PLATFORMS'] = 'cpu'
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    os.environ['JAX_COMPILATION_CACHE_DIR'] = str(folder / 'compiled')
    os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
    model = folder / 'model'
    runs.make_model(model)
    differing = kill_and_compare(
        model, folder, undisturbed(model, folder, fields), settings.kills,
        settings.seed, settings.interrupts, fields)
  print('\n'.join(differing) or 'equal')
  sys.exit(bool(differing))


if __name__ == '__main__':
  main()
