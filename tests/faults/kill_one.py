r"""Kills one of a run's two processes, repeatedly, at known moments.

  python -m tests.faults.kill_one --out=DIR [--kills=40]

The moments take turns: while sampling, updating, saving and evaluating; so do
SIGKILL and SIGTERM, and the two processes. The other process must end within a
minute: if its peer was killed, with status 3, or aborted by jax's coordination
service where that notices first; else both with 42 or 0. The same command
resumes the run; when it is complete, it is compared with one that nothing
interrupted, file by file and bit by bit. Prints a line per kill. The tool
resumes too: DIR holds the runs and the kills so far. Exits with 1 if a process
did not end as it must, or in time, or a run differs.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

from tests import jobs
from tests import runs
from tests.faults import kill

MOMENTS = ('sampling', 'updating', 'saving', 'evaluating')
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
LIMIT_S = 60  # within which the other process ends
LOST, INTERRUPTED = 3, 42  # statuses, see launch/README.md
_STEPS = 6
_SETTINGS = ('--config.eval.period=1', '--config.eval.limit=4',
             f'--config.steps={_STEPS}')


def train(file: str) -> None:
  """Trains; appends a line to FILE.RANK where a phase begins."""
  from tepo_jax import cli
  from tepo_jax import train as program
  from tepo_jax.runtime import checkpoint
  from tepo_jax.runtime import progress
  phases = open(f'{file}.{os.environ["JAX_PROCESS_ID"]}', 'a', encoding='utf-8')

  def noting(function, name):
    def noted(self, what, *arguments):
      print(name or what.split()[0], file=phases, flush=True)
      return function(self, what, *arguments)
    return noted

  progress.Progress.phase = noting(progress.Progress.phase, '')
  checkpoint.Checkpointer.save = noting(checkpoint.Checkpointer.save, 'saving')
  cli.run(program.main, joins_job=True)


def start(folder: pathlib.Path, workdir: pathlib.Path):
  """Starts both processes: (them, the files of their phases)."""
  files = [workdir.with_suffix(f'.phases.{rank}') for rank in range(2)]
  for file in files:
    file.unlink(missing_ok=True)
  program = (f'from tests.faults import kill_one; '
             f'kill_one.train({str(workdir.with_suffix(".phases"))!r})')
  job = jobs.start(
      2, ['-c', program], *runs.train_arguments(folder / 'model', workdir),
      *_SETTINGS, devices=1, JAX_PLATFORMS='cpu',
      JAX_DISABLE_MOST_OPTIMIZATIONS='1',
      JAX_COMPILATION_CACHE_DIR=str(folder / 'compiled'),
      JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0')
  return job, files


def is_moment(file: pathlib.Path, during: str, workdir: pathlib.Path) -> bool:
  """Whether the process whose phases the file lists is in one for the second
  time since its start; a save lasts until its folder has its name."""
  phases = file.read_text('utf-8').split() if file.exists() else []
  if phases.count(during) < 2:
    return False
  return bool(kill.half_saved(workdir)) if during == 'saving' else (
      phases[-1] == during)


def strike(job, number: int, file: pathlib.Path, workdir: pathlib.Path) -> bool:
  """Sends signal `number` to its process, whose phases `file` lists, at its
  moment; False if the run was complete before."""
  during, sent, rank = plan(number)
  while True:
    if all(process.poll() is not None for process in job):
      assert [status for status, *_ in jobs.finish(job)] == [0, 0]
      return False
    if is_moment(file, during, workdir):
      # Half of the kills come a little into the phase, the others at its start.
      time.sleep(random.Random(number).choice([0, 0.02]))
      if job[rank].poll() is None:
        job[rank].send_signal(sent)
        return True
    time.sleep(0.002)


def plan(number: int) -> tuple[str, signal.Signals, int]:
  """The moment of kill `number`, its signal and the process that gets it."""
  return MOMENTS[number % 4], SIGNALS[number // 4 % 2], number // 8 % 2


def attempt(folder, workdir, number: int) -> dict | None:
  """Makes kill `number`; None if the run was complete before."""
  during, sent, rank = plan(number)
  job, files = start(folder, workdir)
  is_late = False
  try:
    if not strike(job, number, files[rank], workdir):
      return None
    begin = time.monotonic()
    try:
      outcomes = jobs.finish(job, LIMIT_S)
    except subprocess.TimeoutExpired:  # jobs.finish has then killed both
      outcomes, is_late = jobs.finish(job), True
  finally:
    for process in job:
      process.kill()
  seconds, statuses = time.monotonic() - begin, [
      status for status, *_ in outcomes]
  wanted = [[INTERRUPTED] * 2, [0, 0]] if sent == signal.SIGTERM else [
      [-sent, status] if rank == 0 else [status, -sent]
      for status in (LOST, -signal.SIGABRT)]
  return {'kill': number + 1, 'signal': sent.name, 'process': rank,
          'during': during,
          'seen': files[rank].read_text('utf-8').split()[-1],
          'seconds': round(seconds, 1), 'statuses': statuses,
          'is_right': statuses in wanted and not is_late,
          'stderr': [text[-6000:] for _, _, text in outcomes]}


def compare(folder: pathlib.Path, workdir: pathlib.Path) -> list[str]:
  """The names of what differs from the undisturbed run."""
  expected, found = (kill.fingerprint(path)
                     for path in (folder / 'alone', workdir))
  return [name for name in sorted(expected.keys() | found.keys())
          if expected.get(name) != found.get(name)]


def run(folder: pathlib.Path, kills: int) -> bool:
  """Makes `kills` kills; whether all was as it must be."""
  if not (folder / 'model').exists():
    runs.make_model(folder / 'model')
  if not (folder / 'alone/checkpoints' / str(_STEPS)).exists():
    outcomes = jobs.finish(start(folder, folder / 'alone')[0], 600)
    assert [status for status, *_ in outcomes] == [0, 0], outcomes
  log, is_right = folder / 'kills.jsonl', True
  done = len(log.read_text().splitlines()) if log.exists() else 0
  finished = len(list(folder.glob('run_*/compared')))
  while True:
    workdir = folder / f'run_{finished}'
    record = attempt(folder, workdir, done) if done < kills else None
    if record:
      done += 1
      is_right &= record['is_right']
      with log.open('a') as file:
        print(json.dumps(record), file=file)
      print(*(f'{name}={value}' for name, value in record.items()
              if name != 'stderr' or not record['is_right']), flush=True)
      continue
    if done >= kills:  # the last run is not complete
      outcomes = jobs.finish(start(folder, workdir)[0], 600)
      assert [status for status, *_ in outcomes] == [0, 0], outcomes
    differing = compare(folder, workdir)
    print(f'{workdir.name}, complete after {done} kills: '
          f'{", ".join(differing) or "equal"}', flush=True)
    is_right &= not differing
    (workdir / 'compared').touch()
    finished += 1
    if done >= kills:
      return is_right


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--kills', type=int, default=40)
  settings = parser.parse_args()
  settings.out.mkdir(parents=True, exist_ok=True)
  sys.exit(not run(settings.out.absolute(), settings.kills))


if __name__ == '__main__':
  main()
