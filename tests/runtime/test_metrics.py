"""runtime.metrics: the file, TensorBoard, timers, the progress lines."""

import io
import json
import math
import re
import sys
import threading
import time

import numpy as np
import pytest
from tensorboardX import record_writer
from tensorboardX.proto import event_pb2

from tepo_jax.runtime import metrics
from tepo_jax.runtime import progress as progress_lib


def _lines(workdir):
  return [json.loads(line) for line in
          (workdir / 'metrics.jsonl').read_text().splitlines()]


def _events(workdir):
  """All TensorBoard events, by file in order of creation."""
  events = []
  for path in sorted((workdir / 'tensorboard').iterdir(),
                     key=lambda p: int(p.name.rsplit('.', 1)[-1])):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], 'little')
      events.append(event_pb2.Event.FromString(data[12:12 + size]))
      data = data[16 + size:]
  return events


def _scalars(workdir):
  return [(e.step, v.tag, v.simple_value)
          for e in _events(workdir) for v in e.summary.value]


def test_every_line_is_valid_json_and_there_at_once(tmp_path):
  writer = metrics.Writer(tmp_path)
  writer.write(1, {'reward': 0.5, 'entropy': np.float32(0.25)})
  writer.write(np.int64(2), {'loss': math.nan, 'kl': -math.inf})
  text = (tmp_path / 'metrics.jsonl').read_text()  # before close
  strict = {'parse_constant': lambda name: pytest.fail(name)}
  assert [json.loads(line, **strict) for line in text.splitlines()] == [
      {'step': 1, 'reward': 0.5, 'entropy': 0.25},
      {'step': 2, 'loss': None, 'kl': None}]
  writer.close()
  assert _scalars(tmp_path)[:2] == [(1, 'reward', 0.5), (1, 'entropy', 0.25)]
  assert math.isnan(_scalars(tmp_path)[2][2])


def test_truncate_deletes_later_steps_and_a_torn_line(tmp_path):
  writer = metrics.Writer(tmp_path)
  for step in range(1, 6):
    writer.write(step, {'x': step})
  writer.close()
  with (tmp_path / 'metrics.jsonl').open('ab') as file:
    file.write(b'{"step": 2, "x": \xc3')  # killed within a character
  writer = metrics.Writer(tmp_path)
  writer.truncate(3)
  writer.write(4, {'x': 40})
  writer.close()
  assert _lines(tmp_path) == [
      {'step': s, 'x': x} for s, x in [(1, 1), (2, 2), (3, 3), (4, 40)]]
  assert {p.name for p in tmp_path.iterdir()} == {'metrics.jsonl',
                                                  'tensorboard'}


def test_tensorboard_hides_what_was_truncated(tmp_path):
  writer = metrics.Writer(tmp_path)
  writer.write(7, {'x': 1})
  writer.truncate(3)
  writer.close()
  starts = [e.step for e in _events(tmp_path)
            if e.session_log.status == event_pb2.SessionLog.START]
  assert starts == [4]


def test_a_failing_tensorboard_warns_once_and_the_run_continues(
    tmp_path, capsys):
  (tmp_path / 'tensorboard').write_text('in the way')
  writer = metrics.Writer(tmp_path)
  writer.write(1, {'x': 1})
  writer.write(2, {'x': 2})
  writer.truncate(1)
  writer.close()
  assert _lines(tmp_path) == [{'step': 1, 'x': 1}]
  assert capsys.readouterr().err.count('TensorBoard') == 1


def test_tensorboard_failing_later_warns_once(tmp_path, capsys, monkeypatch):
  writer = metrics.Writer(tmp_path)
  writer.write(1, {'x': 1})

  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(record_writer.RecordWriter, 'write', full)
  for step in (2, 3, 4):
    writer.write(step, {'x': step})
  writer.close()
  assert len(_lines(tmp_path)) == 4
  assert capsys.readouterr().err.count('No space left') == 1


class _DeadWandb:
  """Replaces the package; the calls named in `dead` fail."""

  def __init__(self, dead):
    self.dead, self.calls = dead, []

  def __getattr__(self, name):
    def call(*_, **__):
      self.calls.append(name)
      if name in self.dead:
        raise RuntimeError('cannot\nreach the server')
      return self
    return call


@pytest.mark.parametrize('dead, calls', [
    (('init',), ['init']), (('log',), ['init', 'log']),
    (('finish',), ['init', 'log', 'log', 'finish'])])
def test_a_dead_wandb_warns_once_and_the_run_continues(
    tmp_path, capsys, monkeypatch, dead, calls):
  wandb = _DeadWandb(dead)
  monkeypatch.setitem(sys.modules, 'wandb', wandb)
  writer = metrics.Writer(tmp_path, 'project', {'seed': 0})
  writer.write(1, {'x': 1})
  writer.write(2, {'x': 2})
  writer.close()
  assert wandb.calls == calls
  assert len(_lines(tmp_path)) == len(_scalars(tmp_path)) == 2
  assert capsys.readouterr().err == (
      'warning: Weights & Biases disabled: cannot reach the server\n')


def test_timers_add_up_and_start_again(monkeypatch):
  clock = iter([0, 1, 10, 12, 20, 23])
  monkeypatch.setattr(metrics.time, 'perf_counter', lambda: next(clock))
  timers = progress_lib.Timers()
  with timers('rollout'):
    pass
  with pytest.raises(KeyError), timers('update'):
    raise KeyError
  with timers('rollout'):
    pass
  assert timers.pop() == {'rollout': 4, 'update': 2}
  assert timers.pop() == {}


class _Terminal(io.StringIO):

  def isatty(self):
    return True


def test_progress_in_a_file(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(metrics.time, 'monotonic', lambda: now[0])
  stream = io.StringIO()
  progress = progress_lib.Progress(3, stream)
  progress.begin(1)
  progress.phase('rollout')
  now[0] = 4.9
  progress.phase('grading')  # too soon
  now[0] = 50.0
  progress.step(1, 'reward 0.5')
  progress.begin(2)
  progress.phase('update')
  assert stream.getvalue() == (
      'step 1/3  rollout ...\nstep 1/3  reward 0.5  eta 1m40s\n'
      'step 2/3  update ...\n')


def test_progress_on_a_terminal_rewrites_two_lines(monkeypatch):
  monkeypatch.setenv('COLUMNS', '60')
  stream = _Terminal()
  progress = progress_lib.Progress(2, stream)
  progress.note('a header')
  progress.begin(1)
  progress.phase('rollout')
  progress.phase('x' * 100)
  progress.step(1, 'reward 0.5', 'avg@8 50.0%')
  progress.begin(2)
  progress.phase('updating')
  progress.close()
  lines = _screen(stream.getvalue())
  assert lines[:2] == ['a header', 'step 1/2  avg@8 50.0%']
  assert lines[2] == 'step 1: reward 0.5'  # of the step that is done
  assert lines[3].startswith(
      'step 2/2  ━━━━━━━━━━──────────  updating ...  eta')
  assert lines[4:] == ['']
  assert all(len(line) < 60 for line in lines)


def _screen(text):
  """The lines on a terminal that supports \\n, \\r, ESC[nA and ESC[J."""
  lines, row, column = [''], 0, 0
  for part in re.findall(r'\x1b\[\d*[AJ]|.|\n', text):
    if part == '\n':
      row, column = row + 1, 0
      lines += [''] * (row + 1 - len(lines))
    elif part == '\r':
      column = 0
    elif part.endswith('A') and len(part) > 1:
      row -= int(part[2:-1])
    elif part.endswith('J') and len(part) > 1:
      lines[row:] = [lines[row][:column]]
    else:
      lines[row] = lines[row][:column] + part + lines[row][column + 1:]
      column += 1
  return lines


def test_progress_after_resume_averages_over_its_own_steps(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(metrics.time, 'monotonic', lambda: now[0])
  stream = io.StringIO()
  now[0] = 500.0
  progress = progress_lib.Progress(100, stream)
  now[0] += 70.0  # restoring
  progress.begin(99)
  now[0] += 10.0
  progress.step(99, '')
  assert 'eta 10s' in stream.getvalue()


def test_the_time_left_is_within_a_fifth_from_step_2_on(monkeypatch):
  """A run whose steps slow down, with compilation and evaluations."""
  now, compiled = [0.0], [0.0]
  monkeypatch.setattr(metrics.time, 'monotonic', lambda: now[0])
  steps, period = 40, 10
  progress = progress_lib.Progress(
      steps, io.StringIO(), eval_period=period,
      compile_seconds=lambda: compiled[0])

  def compile_for(seconds):
    now[0] += seconds
    compiled[0] += seconds

  def evaluate(seconds):
    with progress.evaluating('aime24'):
      now[0] += seconds

  now[0] += 90  # the base model
  compile_for(200)
  evaluate(25)
  estimates, at = {}, {}
  for step in range(1, steps + 1):
    progress.begin(step)
    compile_for({1: 280, 2: 40, 17: 60}.get(step, 0))
    now[0] += 10 * (1 + 0.01 * step + 0.1 * (-1) ** step) + 15 * (step == 1)
    if step % period == 0:
      evaluate(20 + step % 3)
    progress.step(step, '')
    estimates[step] = progress.seconds_left(step)
    at[step] = now[0] - compiled[0]
  for step in range(2, steps):
    assert estimates[step] == pytest.approx(at[steps] - at[step], rel=0.2), step
  assert estimates[1] > at[steps] - at[1]  # its warm-up is all it knows
  assert estimates[steps] == 0


def _wait_for(stream, text):
  deadline = time.monotonic() + 10
  while text not in stream.getvalue():
    assert time.monotonic() < deadline, stream.getvalue()
    time.sleep(0.02)


def test_a_long_compilation_is_announced_with_its_seconds(monkeypatch):
  monkeypatch.setattr(progress_lib, 'TICK_SECONDS', 0.01)
  text = 'compiling decode 64 × 1,024, first run only'
  threads = threading.active_count()
  for stream, shown in ((_Terminal(), f'{text}: 3s'), (
      io.StringIO(), f'{text} ...\n')):
    progress = progress_lib.Progress(6, stream)
    progress.compiling('quick')
    progress.compiled()
    progress.compiled()  # of a program that nobody announced
    progress.compiling('decode 64 × 1,024')
    _wait_for(stream, shown)
    monkeypatch.setattr(progress_lib, 'LONG_SECONDS', 0)
    progress.compiled()
    assert threading.active_count() == threads
    assert 'compiled decode 64 × 1,024 in 0s\n' in stream.getvalue()
    monkeypatch.undo()
    monkeypatch.setattr(progress_lib, 'TICK_SECONDS', 0.01)
    progress.compiling('never ends')
    progress.close()
    assert threading.active_count() == threads


@pytest.mark.parametrize('seconds, text', [
    (0.4, '0s'), (59.6, '1m00s'), (90, '1m30s'), (7265, '2h01m')])
def test_duration(seconds, text):
  assert progress_lib.duration(seconds) == text
