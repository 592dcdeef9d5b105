"""runtime.progress: timers, the live block on a terminal, lines without one."""

import io
import re
import sys
import textwrap
import threading
import time

import pytest

from tepo_jax.runtime import progress as progress_lib


def test_timers_add_up_and_start_again(monkeypatch):
  clock = iter([0, 1, 10, 12, 20, 23])
  monkeypatch.setattr(progress_lib.time, 'perf_counter', lambda: next(clock))
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


def _stderr(monkeypatch, stream):
  """Makes `stream` the standard error, of 80 columns without colours."""
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', '80')
  monkeypatch.setenv('NO_COLOR', '1')
  monkeypatch.setattr(sys, 'stderr', stream)
  monkeypatch.setattr(
      progress_lib, '_STDERR', type(progress_lib._STDERR)(stderr=True))
  return stream


def test_progress_in_a_file(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(progress_lib.time, 'monotonic', lambda: now[0])
  stream = _stderr(monkeypatch, io.StringIO())
  progress = progress_lib.Progress(3)
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


def test_progress_on_a_terminal_erases_nothing_but_its_block(monkeypatch):
  stream = _stderr(monkeypatch, _Terminal())
  progress = progress_lib.Progress(2)
  progress.note(long := 'words ' * 20)
  progress.begin(1)
  progress.phase('sampling [of 8]')
  print('a warning', file=sys.stderr)
  progress.step(
      1, 'reward 0.5  accuracy 0.5  entropy 0.1234  gradient 0.367  '
      'tokens/s 8443  seconds 1.2', 'avg@8 50.0%')
  progress.begin(2)
  progress.phase('updating')
  print('interrupted', file=sys.stderr)
  progress.close()
  print('a table')
  assert sys.stderr is stream
  print('the end', file=sys.stderr)
  assert _screen(stream.getvalue()) == [
      *textwrap.wrap(long, 80), 'a warning', 'step 1/2  avg@8 50.0%',
      'interrupted',
      'step 1: reward 0.5  accuracy 0.5  entropy 0.1234  gradient 0.367  '
      'tokens/s 8443', 'seconds 1.2',
      f'step 2/2  {5 * "━"}{" " * 5}  eta 0s  updating ...', 'the end', '']
  assert '\x1b[?25l' not in stream.getvalue()  # the cursor is never hidden


def test_a_terminal_shows_trends_and_a_completion(monkeypatch):
  stream = _stderr(monkeypatch, _Terminal())
  progress = progress_lib.Progress(3)
  progress.sample('wrong', 'a\x1b[2J ' + 'a ' * 300)
  progress.sample('correct', 'too soon after the other')
  for step, accuracy in enumerate((0.1, 0.2, 0.45), 1):
    progress.begin(step)
    progress.trend({'accuracy': accuracy, 'entropy': float('nan')})
    progress.step(step, f'reward 1  accuracy {accuracy}  entropy nan')
  progress.close()
  numbers, _, first, second = _screen(stream.getvalue())[:4]
  assert numbers == 'step 3: reward 1  accuracy 0.45 ▁▃█  entropy nan'
  assert first.startswith(r'wrong: a\x1b[2J a a') and '…' in first + second
  assert len(first) <= 80 and len(second) <= 80 and second.endswith('a')


def test_a_terminal_shows_the_share_of_a_phase_and_what_compiles(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(progress_lib.time, 'monotonic', lambda: now[0])
  stream = _stderr(monkeypatch, _Terminal())
  progress = progress_lib.Progress(3)
  for seconds in 3, 0:
    progress.begin(1)
    progress.phase('sampling 4 × 8 completions')
    now[0] += seconds
    progress.phase('updating')
    now[0] += seconds / 3
    with progress.evaluating('sums'):
      now[0] += 50
    if seconds:
      progress.step(1, '')
  shown = stream.getvalue()
  assert 'sampling 4 × 8 completions ... (75%)' in shown
  assert 'updating ... (25%)' in shown and 'evaluating sums ... (' not in shown
  progress.compiling('decode 8 × 64')
  now[0] += 2
  progress.phase('sampling')
  assert 'compiling decode 8 × 64: 2s' in stream.getvalue()
  progress.close()


@pytest.mark.parametrize('values, bars', [
    ([1.0], '▁'), ([2, 2, 2], '▁▁▁'), (range(16), '▁▂▃▄▅▆▇█'), ([3, 0], '█▁')])
def test_a_spark_line(values, bars):
  assert progress_lib.spark(list(values)) == bars


def test_a_long_text_loses_its_middle():
  assert progress_lib.shortened('0123456789abcdef', 9) == '012 … def'
  assert progress_lib.shortened('0123', 4) == '0123'


def test_silence(monkeypatch):
  stream = _stderr(monkeypatch, io.StringIO())
  monkeypatch.setattr(progress_lib, '_is_silent', False)
  progress_lib.silence()
  progress = progress_lib.Progress(3)
  progress.begin(1)
  progress.step(1, 'reward 0.5')
  assert not stream.getvalue()


def _screen(text):
  """The lines on a terminal that supports \\n, \\r, ESC[1A and ESC[2K."""
  lines, row, column = [''], 0, 0
  for part in re.findall(r'\x1b\[\??\d*[A-Za-z]|.|\n', text):
    if part == '\n':
      row, column = row + 1, 0
      lines += [''] * (row + 1 - len(lines))
    elif part == '\r':
      column = 0
    elif part == '\x1b[1A':
      row -= 1
    elif part == '\x1b[2K':
      lines[row] = ''
    elif not part.startswith('\x1b'):
      lines[row] = (lines[row].ljust(column)[:column] + part
                    + lines[row][column + 1:])
      column += 1
  return [line.rstrip() for line in lines]


def test_only_a_terminal_shows_a_bar_and_not_at_the_end(monkeypatch):
  for kind in (io.StringIO, _Terminal):
    stream = _stderr(monkeypatch, kind())
    with progress_lib.counting('[set]', 5, done=2) as advance:
      advance(3)
    assert list(progress_lib.track(iter('abc'), '[set]', 5)) == list('abc')
    shown = stream.getvalue()
    assert ('[set] ━' in shown and ' 40%' in shown) == (kind is _Terminal)
    assert not ''.join(_screen(shown))


def test_progress_after_resume_averages_over_its_own_steps(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(progress_lib.time, 'monotonic', lambda: now[0])
  stream = _stderr(monkeypatch, io.StringIO())
  now[0] = 500.0
  progress = progress_lib.Progress(100)
  now[0] += 70.0  # restoring
  progress.begin(99)
  now[0] += 10.0
  progress.step(99, '')
  assert 'eta 10s' in stream.getvalue()


def test_the_time_left_is_within_a_fifth_from_step_2_on(monkeypatch):
  """A run whose steps slow down, with compilation and evaluations."""
  now, compiled = [0.0], [0.0]
  monkeypatch.setattr(progress_lib.time, 'monotonic', lambda: now[0])
  steps, period = 40, 10
  progress = progress_lib.Progress(
      steps, eval_period=period, compile_seconds=lambda: compiled[0])

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


@pytest.mark.parametrize('stream, shown', [
    (_Terminal(), 'decode 64 × 1,024: '),
    (io.StringIO(), 'decode 64 × 1,024 ...\n')])
def test_a_long_compilation_is_announced(monkeypatch, stream, shown):
  monkeypatch.setattr(progress_lib, 'LONG_SECONDS', 0.5)
  _stderr(monkeypatch, stream)
  threads = threading.active_count()
  progress = progress_lib.Progress(6)
  progress.compiling('quick')
  progress.compiled()
  progress.compiled()  # of a program that nobody announced
  progress.begin(1)
  progress.phase('sampling')
  progress.compiling('decode 64 × 1,024')
  _wait_for(stream, shown)
  progress.compiled()
  assert 'compiled decode 64 × 1,024 in ' in stream.getvalue()
  assert 'quick' not in stream.getvalue()
  progress.compiling('never ends')
  progress.close()
  time.sleep(0.1)
  assert threading.active_count() <= threads  # of an earlier test, one may end


@pytest.mark.parametrize('seconds, text', [
    (0.4, '0s'), (59.6, '1m00s'), (90, '1m30s'), (7265, '2h01m')])
def test_duration(seconds, text):
  assert progress_lib.duration(seconds) == text
