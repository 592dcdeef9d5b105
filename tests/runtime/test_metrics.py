"""runtime.metrics: the file, TensorBoard, Weights & Biases."""

import json
import math
import shutil
import sys
import types

import numpy as np
import pytest
from tensorboardX import record_writer
from tensorboardX.proto import event_pb2

from tepo_jax import errors
from tepo_jax.runtime import metrics


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
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and said.endswith(' MB free)\n')
  assert f'disabled: {tmp_path}/tensorboard: No space left on dev' in said


@pytest.mark.parametrize('line', [
    '3', '[]', '{}', 'null', '{"step": "1"}', '{"step": null}',
    '{"steps": 1}', '{"step": 2, "reward": "high"}', 9999 * '1',
    '{"step": 2, "re', '{"step": 2, "x": .5}\n{"step": 3}', '\ufffd\x00'])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
  """Where a run resumes, and wherever else the file is read."""
  text = f'{{"step": 1}}\n{line}\n'
  (tmp_path / 'metrics.jsonl').write_text(text)
  writer = metrics.Writer(tmp_path)
  for read in (lambda: writer.truncate(1), lambda: metrics.read(tmp_path)):
    with pytest.raises(errors.InputError) as error:
      read()
    assert str(error.value).startswith(
        f'{tmp_path}/metrics.jsonl: line 2 is ')
    assert str(error.value).endswith('; delete that line')
  assert (tmp_path / 'metrics.jsonl').read_text() == text


def test_records_are_read_without_a_torn_line(tmp_path):
  assert metrics.read(tmp_path) == []
  (tmp_path / 'metrics.jsonl').write_text(
      '{"step": 1, "x": null}\n{"step": 2, "x": 0.5}\n{"step": 3, "\udcff',
      errors='surrogateescape')
  assert metrics.read(tmp_path) == [
      {'step': 1, 'x': None}, {'step': 2, 'x': 0.5}]


def test_metrics_that_are_gone_are_missed(tmp_path, capsys):
  metrics.Writer(tmp_path).truncate(-1)
  assert not capsys.readouterr().err
  metrics.Writer(tmp_path).truncate(3)
  assert not capsys.readouterr().err
  (tmp_path / 'metrics.jsonl').unlink()
  metrics.Writer(tmp_path).truncate(3)
  assert capsys.readouterr().err == (
      f'warning: {tmp_path}/metrics.jsonl is missing: the metrics of steps up '
      'to 3 are lost\n')


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


def test_a_run_of_wandb_belongs_to_one_workdir(tmp_path, monkeypatch):
  ids = []
  wandb = types.SimpleNamespace(init=lambda **given: ids.append(
      (given['id'], given['resume'])) or types.SimpleNamespace(
          finish=lambda: None))
  monkeypatch.setitem(sys.modules, 'wandb', wandb)

  def start(name):
    metrics.Writer(tmp_path / name, 'project', {}).close()
    return ids[-1]

  first = start('run')
  assert start('run') == first and first[1] == 'allow'
  assert start('other') != first
  shutil.rmtree(tmp_path / 'run')
  assert start('run') != first


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
