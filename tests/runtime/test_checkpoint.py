"""runtime.checkpoint: exact, sharded, atomic; damage is reported by name."""

import collections
import errno
import functools
import os
import pathlib
import resource
import signal
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import digests
from tepo_jax.runtime import mesh as mesh_lib
from tests import jobs

pytestmark = pytest.mark.long

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _state(seed=0):
  rng = np.random.default_rng(seed)
  params = {
      'w': jnp.asarray(rng.normal(size=(64, 48)), jnp.float32),
      'half': jnp.asarray(rng.normal(size=(8, 4)), jnp.bfloat16)}
  # Values that an inexact round trip would change.
  params['w'] = params['w'].at[0, :4].set(
      jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45]))
  return {'step': jnp.int32(seed), 'params': params,
          'opt_state': optax.adamw(1e-3).init(params)}


def _abstract(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=x.sharding), state)


def _assert_same_bits(tree, other):
  assert jax.tree.structure(tree) == jax.tree.structure(other)
  for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other)):
    assert x.dtype == y.dtype and x.shape == y.shape
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def _save(directory, *steps):
  checkpointer = checkpoint.Checkpointer(directory)
  for step in steps:
    checkpointer.save(step, _state(step), {'cursor': step})
  checkpointer.close()


def test_bit_exact_and_keeps_the_last(tmp_path):
  _save(tmp_path / 'c', 1, 2, 3)
  checkpointer = checkpoint.Checkpointer(tmp_path / 'c')
  assert checkpointer.latest() == 3
  state, extra = checkpointer.restore(None, _abstract(_state()))
  _assert_same_bits(state, _state(3))
  assert extra == {'cursor': 3}
  state, extra = checkpointer.restore(2, _abstract(_state()))
  _assert_same_bits(state, _state(2))
  with pytest.raises(errors.InputError, match=r'of step 1 .*\[2, 3\]'):
    checkpointer.restore(1, _abstract(_state()))
  with pytest.raises(ValueError, match='does not follow'):
    checkpointer.save(3, _state(3), {})
  checkpointer.close()


def test_one_part_is_read_without_the_others(tmp_path):
  """Which may not fit: Adam's moments are twice the weights."""
  _save(tmp_path, 1)
  abstract, expected = _abstract(_state()), _state(1)['params']
  state = collections.namedtuple('State', abstract)
  checkpointer = checkpoint.Checkpointer(tmp_path)
  before = sum(x.nbytes for x in jax.live_arrays())
  params, extra = checkpointer.restore(
      1, state(**abstract), part='params')
  assert sum(x.nbytes for x in jax.live_arrays()) - before == sum(
      x.nbytes for x in jax.tree.leaves(expected))
  _assert_same_bits(params, expected)
  assert extra == {'cursor': 1}
  checkpointer.close()


def test_onto_another_mesh(tmp_path):
  axes = {'w': ('embed', 'mlp'), 'v': ('vocab', 'embed')}

  def shardings(**shape):
    return mesh_lib.shardings(mesh_lib.make(shape), axes)

  host = {name: np.random.default_rng(0).normal(size=(8, 12)).astype('f4')
          for name in axes}
  saved = jax.device_put(host, shardings(data=1, fsdp=4, tensor=1))
  checkpointer = checkpoint.Checkpointer(tmp_path)
  checkpointer.save(1, saved, {})
  checkpointer.wait()
  wanted = shardings(data=1, fsdp=2, tensor=2)
  state, _ = checkpointer.restore(1, jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      host, wanted))
  _assert_same_bits(state, host)
  assert {k: x.sharding for k, x in state.items()} == wanted
  assert state['w'].addressable_shards[0].data.shape == (4, 6)
  checkpointer.close()


def test_the_state_may_be_donated_while_it_is_saved(tmp_path):
  state = {'w': jnp.arange(4_000_000, dtype=jnp.float32)}
  overwrite = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 1, t),
                      donate_argnums=0)
  checkpointer = checkpoint.Checkpointer(tmp_path)
  checkpointer.save(1, state, {})
  state = jax.block_until_ready(overwrite(state))
  restored, _ = checkpointer.restore(1, _abstract(state))
  np.testing.assert_array_equal(
      restored['w'], np.arange(4_000_000, dtype=np.float32))
  checkpointer.close()


@pytest.mark.parametrize('place', ['params/w', 'params/half', 'step'])
def test_a_changed_bit_is_found(tmp_path, place, monkeypatch):
  """The files are readable, but differ from what was saved by one bit."""
  def flipped(state):
    *path, last = place.split('/')
    node = state
    for key in path:
      node = node[key]
    bits = np.array(node[last])
    bits.reshape(-1).view(np.uint8)[0] ^= 1
    node[last] = jnp.asarray(bits)
    return state

  honest = digests.compute
  monkeypatch.setattr(digests, 'compute', lambda tree: honest(_state(2)))
  checkpointer = checkpoint.Checkpointer(tmp_path)
  checkpointer.save(2, flipped(_state(2)), {})
  checkpointer.wait()
  monkeypatch.undo()
  with pytest.raises(
      checkpoint.DamagedError,
      match=f'{tmp_path}/2: {place} differs from what was saved'):
    checkpointer.restore(2, _abstract(_state()))
  checkpointer.close()


def test_the_digest_is_a_sum_over_bits():
  """A value by hand; it detects flips and swaps, and ignores the sharding."""
  # bits of 1.0 and 2.0, times (1·K ^ (1·K >> 15)) | 1, the same of 2K.
  k = 2654435761
  first, second = k, 2 * k % 2 ** 32
  odd = [(m ^ (m >> 15)) | 1 for m in (first, second)]
  want = (0x3f800000 * odd[0] + 0x40000000 * odd[1]) % 2 ** 32
  assert digests.compute({'x': jnp.array([1.0, 2.0])}) == {'x': want}
  w = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
  seen = {digests.compute({'w': w})['w']}
  for bit in range(32):
    changed = w.copy()
    changed.view(np.uint32)[3, 5] ^= np.uint32(1 << bit)
    seen.add(digests.compute({'w': changed})['w'])
  seen.add(digests.compute({'w': w[::-1].copy()})['w'])
  assert len(seen) == 34
  sharding = mesh_lib.shardings(
      mesh_lib.make({'data': 1, 'fsdp': 2, 'tensor': 2}),
      {'w': ('embed', 'mlp')})
  assert digests.compute(jax.device_put({'w': w}, sharding)) == (
      digests.compute({'w': w}))


def test_restores_the_last_undamaged_step(tmp_path, capsys):
  _save(tmp_path, 1, 2)
  os.truncate(_largest(tmp_path / '2' / 'state'), 0)
  checkpointer = checkpoint.Checkpointer(tmp_path)
  step, state, extra = checkpointer.restore_last_good(_abstract(_state()))
  assert (step, extra) == (1, {'cursor': 1})
  _assert_same_bits(state, _state(1))
  warned = capsys.readouterr().err
  assert f'{tmp_path}/2 cannot be restored' in warned
  assert (tmp_path / 'damaged_2' / 'state').is_dir()
  checkpointer.save(2, _state(2), {'cursor': 2})  # the step again
  checkpointer.close()
  checkpointer = checkpoint.Checkpointer(tmp_path)
  assert checkpointer.restore_last_good(_abstract(_state()))[0] == 2
  checkpointer.close()


def test_what_a_disk_refuses_to_read_is_not_set_aside(tmp_path):
  """Here because the process has no file descriptor left."""
  _save(tmp_path, 1, 2)
  checkpointer = checkpoint.Checkpointer(tmp_path)
  limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  with open(os.devnull) as last:
    resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 1, most))
    try:
      with pytest.raises(errors.RunError, match=f'{tmp_path}/2 cannot be read'):
        checkpointer.restore_last_good(_abstract(_state()))
    finally:
      resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
  assert checkpointer.restore_last_good(_abstract(_state()))[0] == 2
  checkpointer.close()
  assert (tmp_path / '2').is_dir()


_JOB = """
import errno, os, pathlib, sys
import jax, numpy as np
from tepo_jax import errors
from tepo_jax.runtime import checkpoint, mesh as mesh_lib, processes
processes.initialize()
folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = jax.process_index()
mesh = mesh_lib.make({'data': 1, 'fsdp': -1, 'tensor': 1})
state = mesh_lib.put({'w': np.random.default_rng(0).random((64, 999))},
                     mesh_lib.shardings(mesh, {'w': ('embed', None)}))
saving = checkpoint.Checkpointer(folder)
for step in 1, 2:
  saving.save(step, state, {'cursor': step})
saving.close()

def damage():  # what the second process alone reads
  for path in (folder / '2/state/ocdbt.process_1/d').iterdir():
    os.truncate(path, 0)

def hold_back():  # the first process lists step 2 later, or never
  checkpoint.LISTING_SECONDS = 3
  def listing(self, reload=checkpoint.ocp.CheckpointManager.reload):
    reload(self)
    self.late = what == 'late'
  steps = checkpoint.ocp.CheckpointManager.all_steps
  if rank == 0:
    manager = checkpoint.ocp.CheckpointManager
    manager.late, manager.reload = False, listing
    manager.all_steps = lambda self, *_: [
        step for step in steps(self) if step < 2 or self.late]
    manager.latest_step = lambda self: max(self.all_steps())

processes.on_first(damage if what == 'damage' else lambda: None)
if what == 'refused' and rank:
  handler = checkpoint.ocp.JsonCheckpointHandler
  def refuse(self, path, restore=handler.restore):
    if path.name == 'extra':
      raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
    return restore(self, path)
  handler.restore = refuse
elif what in ('late', 'never'):
  hold_back()
checkpointer = checkpoint.Checkpointer(folder)
try:
  step, restored, extra = checkpointer.restore_last_good(
      jax.tree.map(lambda x: jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=x.sharding), state))
except (errors.InputError, errors.RunError) as error:
  print(type(error).__name__, error)
else:
  assert mesh_lib.to_host(restored['w']).tobytes() == (
      mesh_lib.to_host(state['w']).tobytes()) and extra == {'cursor': step}
  print('restored', step)
checkpointer.close()
"""


@pytest.mark.parametrize('what, said, left', [
    ('damage', 'restored 1', {'1', 'damaged_2'}),
    ('late', 'restored 2', {'1', '2'}),
    ('never', 'not all processes of this job see the checkpoint of step 2',
     {'1', '2'}),
    ('refused', 'RunError checkpoint ', {'1', '2'})])
def test_all_processes_of_a_job_restore_one_step(tmp_path, what, said, left):
  outcomes = jobs.finish(
      jobs.start(2, ['-c', _JOB], str(tmp_path), what, devices=1), 120)
  for status, out, error in outcomes:
    assert status == 0 and said in out, error
  assert ('process 1: ' in outcomes[1][2]) == (what in ('damage', 'refused'))
  assert {path.name for path in tmp_path.iterdir()} == left


def test_all_steps_damaged(tmp_path):
  _save(tmp_path, 1)
  os.truncate(_largest(tmp_path / '1' / 'state'), 0)
  checkpointer = checkpoint.Checkpointer(tmp_path)
  with pytest.raises(checkpoint.DamagedError):
    checkpointer.restore_last_good(_abstract(_state()))
  checkpointer.close()
  assert (tmp_path / '1').is_dir()


def test_checkpoints_of_another_run_are_left_alone(tmp_path):
  _save(tmp_path, 1, 2)
  other = _state()
  other.pop('step')
  checkpointer = checkpoint.Checkpointer(tmp_path)
  with pytest.raises(errors.InputError, match='step is in it'):
    checkpointer.restore_last_good(_abstract(other))
  checkpointer.close()
  assert {p.name for p in tmp_path.iterdir()} == {'1', '2'}


@pytest.mark.parametrize('is_resumed', [False, True])
def test_which_steps_are_kept(tmp_path, is_resumed, capfd):
  """The last two, multiples of 4, and the best of those with a score; also if
  another process makes each save."""
  reopen = functools.partial(
      checkpoint.Checkpointer, tmp_path, keep=2, keep_every=4)
  checkpointer = reopen()
  scores = {1: .1, 2: .9, 3: None, 4: .5, 5: None, 6: .9, 7: .2, 9: None}
  for step, score in scores.items():
    if is_resumed:
      checkpointer.close()
      checkpointer = reopen()
    checkpointer.save(step, {'w': jnp.zeros(3)}, {}, score)
  checkpointer.close()
  kept = {p.name for p in tmp_path.iterdir()}
  assert kept == {'4', '6', '7', '9'}


@pytest.mark.parametrize('name', ['²', '١', 200 * '9'])
def test_other_folders_are_no_steps(tmp_path, name):
  (tmp_path / name).mkdir()
  assert checkpoint.steps(tmp_path) == []


def test_nothing_saved_yet(tmp_path):
  checkpointer = checkpoint.Checkpointer(tmp_path)
  assert checkpointer.latest() is None
  assert checkpointer.describe_latest() == 'there is no checkpoint yet'
  assert checkpointer.restore_last_good(_abstract(_state())) is None
  with pytest.raises(errors.InputError, match=r'no checkpoint.*it has: \[\]'):
    checkpointer.restore(None, _abstract(_state()))
  checkpointer.close()


@pytest.mark.parametrize('change, said', [
    (lambda s: s['params'].update(w=jnp.zeros((64, 49))),
     r'params/w is float32\[64, 48\] in it, float32\[64, 49\] in this run'),
    (lambda s: s['params'].update(w=jnp.zeros((64, 48), jnp.bfloat16)),
     r'params/w is float32\[64, 48\] in it, bfloat16\[64, 48\] in this run'),
    (lambda s: s.update(new=jnp.zeros(3)), 'new is not in it'),
    (lambda s: s.pop('step'), 'step is in it, but not in this run')])
def test_arrays_of_another_run_are_named(tmp_path, change, said):
  _save(tmp_path, 1)
  other = _state()
  change(other)
  with pytest.raises(errors.InputError, match=said) as error:
    checkpoint.Checkpointer(tmp_path).restore(1, _abstract(other))
  assert str(tmp_path / '1') in str(error.value)


def _largest(folder):
  return max((p for p in folder.rglob('*') if p.is_file()),
             key=lambda p: p.stat().st_size)


@pytest.mark.parametrize('damage, said', [
    (lambda step: os.truncate(_largest(step / 'state'), 0), 'array'),
    (lambda step: _largest(step / 'state').unlink(), 'array'),
    (lambda step: (step / 'state' / 'manifest.ocdbt').write_bytes(b'?' * 115),
     'manifest'),
    (lambda step: (step / 'state' / '_METADATA').unlink(),
     'its list of arrays is missing'),
    (lambda step: (step / 'extra' / 'metadata').write_text('{"cur'),
     'Unterminated string'),
], ids=['data cut', 'data gone', 'manifest', 'metadata', 'extra'])
def test_a_broken_checkpoint_is_named_and_the_one_before_is_good(
    tmp_path, damage, said, monkeypatch):
  stray = []
  monkeypatch.setattr(sys, 'unraisablehook', cli._unraisable)
  monkeypatch.setattr(sys, '__unraisablehook__', stray.append)
  _save(tmp_path, 1, 2)
  damage(tmp_path / '2')
  checkpointer = checkpoint.Checkpointer(tmp_path)
  with pytest.raises(errors.InputError) as error:
    checkpointer.restore(None, _abstract(_state()))
  assert f'checkpoint {tmp_path / "2"} cannot be restored: ' in str(error.value)
  assert said in str(error.value) and '\n' not in str(error.value)
  assert 'TensorStore(' not in str(error.value)  # its settings
  assert not stray
  state, _ = checkpointer.restore(1, _abstract(_state()))
  _assert_same_bits(state, _state(1))
  checkpointer.close()


def test_read_only_leaves_a_running_save_alone(tmp_path):
  with pytest.raises(errors.InputError, match='is missing'):
    checkpoint.Checkpointer(tmp_path / 'none', read_only=True)
  assert not (tmp_path / 'none').exists()
  (tmp_path / 'file').touch()
  with pytest.raises(errors.InputError, match='/file is a file, not a folder'):
    checkpoint.Checkpointer(tmp_path / 'file', read_only=True)
  _save(tmp_path, 1)
  unfinished = tmp_path / '2.orbax-checkpoint-tmp'
  unfinished.mkdir()
  reader = checkpoint.Checkpointer(tmp_path, read_only=True)
  assert reader.latest() == 1
  assert reader.restore(None, _abstract(_state()))[1] == {'cursor': 1}
  reader.close()
  assert unfinished.exists()


_KILLED = """
import os, signal, sys, threading
import jax.numpy as jnp
from tepo_jax import cli
from tepo_jax.runtime import checkpoint
cli.quiet()
c = checkpoint.Checkpointer(sys.argv[1])
c.save(1, {'w': jnp.full((3_000_000,), 1.0)}, {'cursor': 1})
c.wait()
checkpoint.Checkpointer(sys.argv[1], read_only=True).close()
threading.Timer(float(sys.argv[2]), os.kill,
                (os.getpid(), signal.SIGKILL)).start()
c.save(2, {'w': jnp.full((3_000_000,), 2.0)}, {'cursor': 2})
c.wait()
print('saved', flush=True)
signal.pause()
"""


@pytest.mark.parametrize('delay', [0.0, 0.02, 0.05, 1.0])
def test_killed_while_saving(tmp_path, delay):
  done = subprocess.run(
      [sys.executable, '-c', _KILLED, str(tmp_path), str(delay)],
      capture_output=True, text=True, timeout=60,
      env=os.environ | {'PYTHONPATH': str(ROOT)})
  assert done.returncode == -signal.SIGKILL
  assert done.stderr == ''  # and Orbax is quiet
  checkpointer = checkpoint.Checkpointer(tmp_path)
  step = checkpointer.latest()
  assert step == 2 if 'saved' in done.stdout else step in (1, 2)
  abstract = _abstract({'w': jnp.zeros(3_000_000)})
  state, extra = checkpointer.restore(None, abstract)
  assert extra == {'cursor': step}
  assert (np.asarray(state['w']) == step).all()
  checkpointer.save(5, state, {'cursor': 5})
  checkpointer.close()
  assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
      map(str, {step, 5, *([1] if step == 2 else [])}))[-2:]


# Saves steps 1 (unless the second argument is 'from the start'), 2, which fails
# on a limit of file sizes, and 3 (if it is 'space again'), then closes.
_FULL = """
import os, resource, sys
import jax.numpy as jnp
from tepo_jax import cli, errors
from tepo_jax.runtime import checkpoint
cli.quiet()
c = checkpoint.Checkpointer(sys.argv[1])
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

def save(step):
  c.save(step, {'w': jnp.arange(300_000.) + step}, {'cursor': step})
  c.wait()

saved = [] if sys.argv[2] == 'from the start' else ['1']
if saved:
  save(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
save(2)
assert sorted(os.listdir(sys.argv[1])) == saved, os.listdir(sys.argv[1])
if sys.argv[2] == 'space again':
  resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  save(3)
try:
  c.close()
except errors.RunError as error:
  print(error)
"""


def _full_disk(*arguments):
  done = subprocess.run(
      [sys.executable, '-c', _FULL, *arguments], capture_output=True,
      text=True, timeout=60, env=os.environ | {'PYTHONPATH': str(ROOT)})
  assert done.returncode == 0, done.stderr
  return done


def test_a_checkpoint_may_be_refused_before_its_arrays_are_read(tmp_path):
  _save(tmp_path, 1, 2)
  os.truncate(_largest(tmp_path / '2' / 'state'), 0)

  def refuse(where, extra):
    raise errors.InputError(f'{where} is not mine: {extra["cursor"]}')

  checkpointer = checkpoint.Checkpointer(tmp_path)
  with pytest.raises(errors.InputError,
                     match=f'checkpoint {tmp_path}/2 is not mine: 2'):
    checkpointer.restore_last_good(_abstract(_state()), check=refuse)
  checkpointer.close()
  assert {p.name for p in tmp_path.iterdir()} == {'1', '2'}


def test_a_full_disk_costs_one_save(tmp_path):
  done = _full_disk(str(tmp_path), 'space again')
  [warning] = done.stderr.splitlines()
  assert f'{tmp_path}/2 could not be saved: ' in warning and not done.stdout
  checkpointer = checkpoint.Checkpointer(tmp_path)
  step, state, _ = checkpointer.restore_last_good(
      _abstract({'w': jnp.zeros(300_000)}))
  assert step == 3 and float(state['w'][1]) == 4
  checkpointer.close()


@pytest.mark.parametrize('when, latest, message', [
    ('to the end', 1, 'the last checkpoint is of step 1'),
    ('from the start', None, 'there is no checkpoint yet')])
def test_a_full_disk_to_the_end_is_an_error(tmp_path, when, latest, message):
  done = _full_disk(str(tmp_path), when)
  assert message in done.stdout
  assert checkpoint.Checkpointer(tmp_path).latest() == latest


def test_what_a_failed_save_leaves_behind(tmp_path, monkeypatch, capsys):
  """Orbax's other threads of a failed save write on, and what they raise, in
  the removed folder, comes up when the manager is closed."""
  checkpointer = checkpoint.Checkpointer(tmp_path)
  left = tmp_path / '1.orbax-checkpoint-tmp' / 'state'
  manager = checkpointer._manager
  with monkeypatch.context() as patch:
    patch.setattr(manager, 'save', mock.Mock(
        side_effect=OSError(errno.ENOSPC, 'No space left on device')))
    checkpointer.save(1, _state(), {})
    left.mkdir(parents=True)  # by a thread that is late
    check = mock.Mock(side_effect=FileNotFoundError('late'))
    patch.setattr(manager, 'check_for_errors', check)
    checkpointer.save(2, _state(), {})
    assert check.called and not left.parent.exists()
    left.mkdir(parents=True)
  close = mock.Mock(wraps=manager.close, side_effect=[
      FileNotFoundError(errno.ENOENT, 'No such file', str(left)),
      mock.DEFAULT])
  monkeypatch.setattr(manager, 'close', close)
  with pytest.raises(errors.RunError, match=(
      r'/2 could not be saved: .*No space left.* MB free.; there is no '
      'checkpoint yet')):
    checkpointer.close()
  assert close.call_count == 2 and not left.parent.exists()
  assert capsys.readouterr().err.count('\n') == 2


def test_an_error_of_closing_is_one_of_the_save(tmp_path, monkeypatch):
  checkpointer = checkpoint.Checkpointer(tmp_path)
  checkpointer.save(1, _state(), {})
  close = mock.Mock(wraps=checkpointer._manager.close,
                    side_effect=[OSError('gone'), mock.DEFAULT])
  monkeypatch.setattr(checkpointer._manager, 'close', close)
  with pytest.raises(errors.RunError, match='/1 could not be saved: gone'):
    checkpointer.close()


# Saves on a file system that holds one step, or none.
_SMALL = """
import sys
import jax.numpy as jnp
from tepo_jax import cli, errors
from tepo_jax.runtime import checkpoint
cli.quiet()
c = checkpoint.Checkpointer(sys.argv[1])
for step in range(1, 7):
  c.save(step, {f'w{i}': jnp.arange(20_000.) + i for i in range(12)}, {})
try:
  c.close()
except errors.RunError:
  print('failed')
"""
_MOUNT = 'mount -t tmpfs -o size="$1" none "$2" && shift 2 && exec "$@"'


@pytest.mark.parametrize('size', ['200k', '1m'])
def test_a_small_file_system_gives_our_warnings_alone(tmp_path, size):
  def run(*command):
    return subprocess.run(
        ['unshare', '--mount', 'bash', '-c', _MOUNT, 'bash', size, tmp_path,
         *command], capture_output=True, text=True, timeout=100,
        env=os.environ | {'PYTHONPATH': str(ROOT)})

  if run('true').returncode:
    pytest.skip('no permission to mount a file system')
  done = run(sys.executable, '-c', _SMALL, str(tmp_path / 'c'))
  assert done.stdout == 'failed\n'
  lines = done.stderr.splitlines()
  assert lines and all(
      line.startswith(f'warning: checkpoint {tmp_path}/c/')
      and 'could not be saved' in line for line in lines)
  assert any(line.endswith(' MB free)') for line in lines)
