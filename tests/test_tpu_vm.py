"""launch/tpu_vm.sh and the scripts that it runs on hosts, with a stand-in for
gcloud."""

import io
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tarfile
import time

import pytest

from tests import launching

pytestmark = pytest.mark.long

ROOT = launching.ROOT


@pytest.fixture(name='launch')
def _launch(tmp_path):
  return launching.prepare(tmp_path)


_TPUS = ['gcloud', 'compute', 'tpus']
_WHERE = ['--project=p', '--zone=z', '--quiet']
_LOST = [f'--ssh-flag=-o{option}' for option in (
    'ConnectTimeout=30', 'ServerAliveInterval=15', 'ServerAliveCountMax=4')]


def _dry_run(launch, *arguments, **environment):
  done = launch('tpu_vm.sh', '--dry-run', *arguments,
                **launching.SLICE | environment)
  assert done.returncode == 0, done.stderr
  return [shlex.split(line) for line in done.stdout.splitlines()]


def test_tpu_vm_dry_run(launch):
  resource = _TPUS + ['queued-resources']
  create = resource + [
      'create', 'n', '--node-id=n', '--accelerator-type=v6e-8',
      '--runtime-version=v2-alpha-tpuv6e']
  asked, waits = _dry_run(launch, 'create')
  assert asked == create + _WHERE
  assert waits[:5] == resource + ['describe']
  assert _dry_run(launch, 'create', SPOT='1')[0] == (
      create + ['--spot'] + _WHERE)
  assert _dry_run(launch, 'delete') == [
      resource + ['delete', 'n', '--force'] + _WHERE]
  ssh = _TPUS + ['tpu-vm', 'ssh', 'n']

  def sent(line, worker):
    *start, command = line[:8]
    assert start == ssh + [f'--worker={worker}'] and line[8:] == _LOST + _WHERE
    return command.removeprefix('--command=')

  [line] = _dry_run(launch, 'logs')
  assert 'tail' in sent(line, 0)
  [line] = _dry_run(launch, 'logs', 'all')
  assert sent(line, 'all') == 'tepo/launch/tpu_host.sh logs'
  [line] = _dry_run(launch, 'wait')
  assert sent(line, 'all').startswith('tepo/launch/tpu_host.sh report ')
  made, fetch = _dry_run(launch, 'fetch', 'runs/a/b')
  assert made == ['mkdir', '-p', 'runs/a']
  assert fetch[4:8] == ['scp', '--recurse', 'n:tepo/runs/a/b', 'runs/a']
  lines = _dry_run(launch, 'watch', '--x')
  assert lines[0] == create + _WHERE
  assert sent(lines[-2], 'all') == 'tepo/launch/tpu_host.sh resume train --x '
  [line] = _dry_run(launch, 'run', 'export', '--x')
  assert sent(line, 'all') == 'tepo/launch/tpu_host.sh start export --x '
  [line] = _dry_run(launch, 'stop')
  assert sent(line, 'all') == 'tepo/launch/tpu_host.sh stop'
  tar, copy, setup = _dry_run(launch, 'setup')
  assert tar[0] == 'tar' and copy[4] == 'scp'
  assert re.fullmatch(r'n:tepo\.\d+\.tgz', copy[6])
  assert '--worker=all' in copy
  assert '--scp-flag=-oConnectTimeout=30' in copy
  assert 'tepo/launch/setup.sh tpu' in sent(setup, 'all')
  setup = sent(_dry_run(launch, 'setup', BUCKET='b')[-1], 'all')
  assert ' && tepo/launch/tpu_host.sh mount b && ' in setup


def test_flags_of_gcloud_pass_through(launch):
  create, _ = _dry_run(
      launch, 'create',
      CREATE_FLAGS='--reserved --network=x --service-account=a@b')
  assert create[-6:-3] == ['--reserved', '--network=x', '--service-account=a@b']
  [line] = _dry_run(launch, 'stop', SSH_FLAGS='--internal-ip')
  assert line[8:] == ['--internal-ip'] + _LOST + _WHERE
  for command in 'stop', 'setup':  # gcloud has it in alpha only
    line = _dry_run(launch, command, SSH_FLAGS='--tunnel-through-iap')[-1]
    assert line[:4] == ['gcloud', 'alpha', 'compute', 'tpus']
    assert '--tunnel-through-iap' in line


def test_variables_are_passed_on_but_not_shown(launch, tpu):
  (launch.stubs / 'hosts').write_text('2')
  assert tpu('create').returncode == tpu('setup').returncode == 0
  variables = dict(HF_TOKEN='a secret', OTHER='1', PASS='OTHER')
  script, file = (launch.stubs / 'host1' / name for name in (
      'tepo/launch/tpu_host.sh', 'tepo.env'))
  done = tpu('run', '--x', **variables)
  assert done.returncode == 0, done.stderr
  assert not file.exists()  # so the next run has none of them
  assert tpu('wait').returncode == 0
  assert sorted(_lines(launch, 'hosts_log')) == [
      f'w{host} with a token -m tepo_jax.train --x' for host in (0, 1)]
  said = done.stdout + done.stderr + '\n'.join(_lines(launch, 'gcloud_log'))
  assert 'secret' not in said
  script.unlink()  # then nothing takes them
  assert tpu('run', '--x', **variables).returncode
  assert 'export OTHER=1\n' in file.read_text()
  assert stat.S_IMODE(file.stat().st_mode) == 0o600
  assert 'wandb' not in _dry_run(launch, 'setup')[-1][7]
  assert 'wandb' in _dry_run(launch, 'setup', WANDB_API_KEY='k')[-1][7]


def test_a_host_s_program_knows_how_it_is_started_again(launch, tpu):
  (launch.stubs / 'venv_python').write_text(
      '#!/bin/bash\n[[ $* != *tepo_jax* ]] || '
      'echo "$TEPO_COMMAND: $TEPO_REMARK"\n')
  assert tpu('create').returncode == tpu('setup').returncode == 0
  assert tpu('run', '--workdir=gs://b/a run').returncode == 0
  assert tpu('wait').returncode == 0
  assert (launch.stubs / 'host0/tepo/job.log').read_text().startswith(
      r'launch/tpu_vm.sh run train --workdir=gs://b/a\ run: on your machine;')


def _lines(launch, name):
  path = launch.stubs / name
  return path.read_text().splitlines() if path.exists() else []


def _does(launch, host, *what):
  """What the program does on a host, start by start."""
  (launch.stubs / f'does{host}').write_text(
      ''.join(f'{line}\n' for line in what))


def _creates(launch):
  return sum(' create ' in line for line in _lines(launch, 'gcloud_log'))


def test_setup_packs_the_users_files_but_no_results(launch):
  packed = ['own_reward.py', 'tepo_jax/runs/x']
  left = ['.venv/x', 'runs/x', 'bucket/x', 'train.0.log',
          'tepo_jax/__pycache__/x']
  for name in packed + left:
    (launch.root / name).parent.mkdir(parents=True, exist_ok=True)
    (launch.root / name).touch()
  tar, *_ = _dry_run(launch, 'setup')
  archive = subprocess.run(
      [*tar[:2], '-', *tar[3:]], cwd=launch.root, check=True,
      capture_output=True).stdout
  names = {name.removeprefix('./') for name in tarfile.open(
      fileobj=io.BytesIO(archive)).getnames()}
  assert {*packed, 'launch/setup.sh'} <= names and not names & set(left)


def _wait_for(holds):
  deadline = time.monotonic() + 20
  while not holds():
    assert time.monotonic() < deadline
    time.sleep(0.05)


def test_tpu_vm_runs_the_program_on_a_host(launch, tmp_path):
  """A shell runs the command that is sent to a host, with its arguments."""
  arguments = ["--config.eval.sets=('x', 'y')", '--workdir=$(id)']
  [[*_, command, _, _, _, _, _, _]] = _dry_run(launch, 'run', *arguments)
  command = command.removeprefix('--command=')
  host = tmp_path / 'host'
  (host / 'tepo/.venv/bin').mkdir(parents=True)
  shutil.copytree(ROOT / 'launch', host / 'tepo/launch')
  python = host / 'tepo/.venv/bin/python'
  python.write_text(
      '#!/bin/bash\nprintf "%s|" "$TEPO_MULTIHOST" "$@"\n'
      'trap "echo saved; exit 42" TERM\nwhile :; do sleep .1; done')
  python.chmod(0o755)

  def on_host(command):
    return subprocess.run(['bash', '-c', command], cwd=host, text=True,
                          capture_output=True, timeout=30)

  assert on_host(command).returncode == 0
  log = host / 'tepo/job.log'
  _wait_for(lambda: '--workdir' in log.read_text())
  assert log.read_text() == (
      "1|-m|tepo_jax.train|--config.eval.sets=('x', 'y')|--workdir=$(id)|")
  script = host / 'tepo/launch/tpu_host.sh'
  assert '{1..30}' in script.read_text()  # seconds
  script.write_text(script.read_text().replace('{1..30}', '1'))
  again = on_host(command)
  assert again.returncode == 2 and 'stop it first' in again.stderr
  assert on_host(command.replace(' start ', ' resume ')).returncode == 0
  assert on_host('tepo/launch/tpu_host.sh report').stdout.endswith(' running\n')
  assert on_host('tepo/launch/tpu_host.sh stop').returncode == 0
  _wait_for(lambda: log.read_text().endswith('saved\n'))
  _wait_for((host / 'tepo/job.status').exists)
  assert on_host('tepo/launch/tpu_host.sh report').stdout.endswith(' stopped\n')


def test_addresses_in_a_bucket_are_passed_on_and_not_fetched(launch):
  [[*_, command, _, _, _, _, _, _]] = _dry_run(
      launch, 'run', '--config=c.py', '--workdir=gs://b/a run')
  assert command.endswith('train --config=c.py --workdir=gs://b/a\\ run ')
  done = launch('tpu_vm.sh', '--dry-run', 'fetch', 'gs://b/x',
                **launching.SLICE)
  assert done.returncode == 2 and not done.stdout
  assert done.stderr.endswith(': gcloud storage cp -r gs://b/x .\n')


@pytest.fixture(name='tpu')
def _tpu(launch):
  return launching.make_slice(launch)


# What gcloud prints without a login, an API, a project's permission, a zone.
@pytest.mark.parametrize('text', [
    'ERROR: (gcloud.compute.tpus.queued-resources.describe) You do not '
    'currently have an active account selected.',
    'ERROR: (gcloud.compute.tpus.queued-resources.describe) PERMISSION_DENIED: '
    'Cloud TPU API has not been used in project p before or it is disabled.',
    "ERROR: (gcloud.compute.tpus.queued-resources.describe) PERMISSION_DENIED: "
    "Permission denied on 'locations/z' (or it may not exist)."])
def test_what_gcloud_refuses_is_shown_and_not_asked_again(launch, tpu, text):
  (launch.stubs / 'errors').write_text(f'{text}\n' * 30)
  done = tpu('create')
  assert done.returncode == 2 and text in done.stderr
  assert len(_lines(launch, 'gcloud_log')) == 1


_UNREACHED = ('ERROR: gcloud crashed (ConnectionError): HTTPSConnectionPool('
              "host='tpu.googleapis.com', port=443): Max retries exceeded\n")


@pytest.mark.parametrize('error', [
    _UNREACHED,
    'ERROR: (gcloud.compute.tpus.queued-resources.describe) HttpError '
    "accessing <https://tpu.googleapis.com/v2/x>: response: <{'status': "
    "'502'}>, content <<!DOCTYPE html> Server Error>\n",
    'ERROR: (gcloud.compute.tpus.queued-resources.describe) There was a '
    'problem refreshing your current auth tokens: HTTPSConnectionPool('
    "host='oauth2.googleapis.com', port=443): Read timed out.\n"],
    ids=['unreached', '502', 'token'])
def test_a_lost_connection_is_repeated_but_not_for_ever(launch, tpu, error):
  errors = launch.stubs / 'errors'
  errors.write_text(2 * error)
  done = tpu('create')
  assert done.returncode == 0, done.stderr
  assert done.stderr.count('no answer from Google') == 2
  assert _creates(launch) == 1
  errors.write_text(1000 * error)
  done = tpu('create', PAUSE='0')
  assert done.returncode == 2 and error in done.stderr
  assert ('a slice that is there stays, and its 8 chips are billed (about $22 '
          'an hour at list price) until you run') in done.stderr


def test_gcloud_cannot_wait_for_a_password(launch, tpu):
  """As it does on a terminal if an organisation asks for it again."""
  gcloud = launch.stubs / 'gcloud'
  gcloud.write_text(gcloud.read_text().replace('\n', '\ncat >/dev/null\n', 1))
  for command in 'create', 'setup', 'delete':
    with _begin(launch, command, stdin=subprocess.PIPE) as process:
      try:
        assert process.wait(20) == 0, command
      finally:
        process.stdin.close()


def test_a_slice_that_is_taken_away_is_made_again(launch, tpu):
  _does(launch, 0, 'taken', 'preempted')
  done = tpu('watch', '--workdir=bucket/a run')
  assert done.returncode == 0, done.stderr
  assert launch.log() == 3 * [
      '1 -m tepo_jax.train --workdir=bucket/a run']
  assert done.stderr.count('n was taken away') == 2
  assert '(SUSPENDED)' in done.stderr and '(PREEMPTED)' in done.stderr
  # The program's own failure is none of the slice's, and neither is a lost
  # connection.
  made = _creates(launch)
  (launch.stubs / 'errors').write_text(_UNREACHED)
  done = tpu('watch', '--config.seed=7')
  assert done.returncode == 1 and len(launch.log()) == 1
  assert _creates(launch) == made
  assert 'taken away' not in done.stderr
  assert 'and its 8 chips are billed (about $22 an hour' in done.stderr


def test_waiting_ends_with_the_slice_s_node(launch, tpu):
  """The queued resource stays ACTIVE when its node is preempted."""
  assert tpu('create').returncode == tpu('setup').returncode == 0
  _does(launch, 0, 'preempted')
  assert tpu('run', '--x').returncode == 0
  done = tpu('wait')
  assert done.returncode == 42 and 'n is PREEMPTED' in done.stderr
  assert 'SSH: Attempting' not in done.stderr


def test_only_a_node_that_is_not_there_is_a_slice_taken_away(launch, tpu):
  assert tpu('create').returncode == tpu('setup').returncode == 0
  error = launch.stubs / 'node_error'
  error.write_text('ERROR: PERMISSION_DENIED\n')
  done = tpu('watch', '--x')
  assert done.returncode == 2 and 'PERMISSION_DENIED' in done.stderr
  assert 'a slice that is there stays, and its 8 chips are' in done.stderr
  assert not any(' delete ' in line for line in _lines(launch, 'gcloud_log'))
  error.write_text('ERROR: NOT_FOUND\n')
  (launch.stubs / 'host0/down').touch()
  done = tpu('wait')
  assert done.returncode == 42 and 'n is TERMINATED' in done.stderr


def test_a_host_that_stays_unreachable_is_not_billed_for_ever(launch, tpu):
  assert tpu('create').returncode == tpu('setup').returncode == 0
  (launch.stubs / 'host0/down').touch()
  done = tpu('wait', PAUSE='0')
  assert done.returncode == 2 and 'a host does not answer' in done.stderr
  assert 'its 8 chips are billed' in done.stderr
  assert done.stderr.count('exited with return code [255]') == 2  # and `last`


def test_watch_makes_the_slice_of_an_unreachable_host_anew(launch, tpu):
  (launch.stubs / 'deletes').write_text('2')  # refused so often
  _does(launch, 0, 'unreachable')
  done = tpu('watch', '--x', PAUSE='0')
  assert done.returncode == 0, done.stderr
  assert 'making the slice anew (1 of 3)' in done.stderr
  assert _creates(launch) == 2


def test_watch_takes_over_the_same_program_only(launch, tpu):
  assert tpu('create').returncode == tpu('setup').returncode == 0
  _does(launch, 0, 'wait')
  assert tpu('run', '--x=1').returncode == 0
  done = tpu('watch', '--x=2')
  assert done.returncode == 2
  assert done.stderr.endswith('another program is in progress: train --x=1\n')
  (launch.stubs / 'go').touch()
  assert tpu('watch', '--x=1').returncode == 0


@pytest.mark.parametrize('restarted', [0, 1])
def test_watch_starts_no_other_program_on_a_restarted_host(
    launch, tpu, restarted):
  """Which has still the command that it ran before."""
  (launch.stubs / 'hosts').write_text('2')
  assert tpu('create').returncode == tpu('setup').returncode == 0
  _does(launch, 1 - restarted, 'wait')
  _does(launch, restarted, 'restart', 'go')
  assert tpu('run', '--x=1').returncode == 0
  _wait_for(lambda: len(_lines(launch, 'hosts_log')) == 2)
  command = launch.stubs / f'host{restarted}/tepo/job.command'
  command.write_text('train --x=2\n')
  done = tpu('watch', '--x=2')
  assert done.returncode == 2
  assert done.stderr.endswith('another program is in progress: train --x=1\n')
  assert tpu('watch', '--x=1').returncode == 0
  assert not any('--x=2' in line for line in _lines(launch, 'hosts_log'))


def test_a_run_in_a_bucket_that_is_not_mounted_is_refused(launch, tpu):
  (launch.stubs / 'unmounted').touch()
  done = tpu('watch', '--workdir=bucket/r')
  assert done.returncode == 2 and not launch.log()
  assert 't1v-n-w-0: error: bucket/ is not mounted' in done.stderr
  assert tpu('run', '--workdir=gs://b/bucket/r').returncode == 0


def test_an_interrupted_program_is_started_again(launch, tpu):
  assert tpu('create').returncode == tpu('setup').returncode == 0
  _does(launch, 0, 42)
  assert tpu('run', '--x').returncode == 0
  done = tpu('wait')
  assert done.returncode == 42
  assert 'interrupted: the same run resumes' in done.stderr
  _does(launch, 0, 42, 42)
  made = _creates(launch)
  done = tpu('watch', '--x')
  assert done.returncode == 0, done.stderr
  assert len(launch.log()) == 4 and _creates(launch) == made


def _begin(launch, *arguments, stdin=None):
  """Starts tpu_vm.sh, in a session of its own, and does not wait for it."""
  return subprocess.Popen(
      [launch.root / 'launch/tpu_vm.sh', *arguments], env=os.environ | {
          'PATH': f'{launch.stubs}:{os.environ["PATH"]}', 'PAUSE': '.1',
          'STUBS': str(launch.stubs)} | launching.SLICE,
      stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, stdin=stdin,
      start_new_session=True)


def test_watch_survives_a_host_that_google_moves(launch, tpu):
  """The slice's state is then one of those of a request that waits."""
  _does(launch, 0, 'wait')
  with _begin(launch, 'watch', '--x') as watch:
    _wait_for(lambda: _lines(launch, 'hosts_log'))
    (launch.stubs / 'state').write_text('PROVISIONING\n')
    _wait_for(lambda: 'n is PROVISIONING' in watch.stderr.readline())
    (launch.stubs / 'state').write_text('ACTIVE\n')
    (launch.stubs / 'go').touch()
    assert watch.wait(20) == 0, watch.stderr.read()
  assert len(launch.log()) == 1 and _creates(launch) == 1


def test_what_ssh_prints_is_shown_with_its_status(launch, tpu):
  """Of logs at once: it may run for hours."""
  assert tpu('create').returncode == tpu('setup').returncode == 0
  assert tpu('run', '--x').returncode == tpu('wait').returncode == 0
  assert 'SSH: Attempting to connect' in tpu('stop').stderr
  with _begin(launch, 'logs') as logs:
    assert 'SSH: Attempting to connect' in logs.stderr.readline()
    os.killpg(logs.pid, signal.SIGTERM)
  (launch.stubs / 'host0/down').touch()
  for command in 'logs', 'stop':
    done = tpu(command)
    assert done.returncode == 255
    assert 'exited with return code [255]' in done.stderr


def test_a_stopped_program_is_not_started_again(launch, tpu):
  _does(launch, 0, 'save')
  with _begin(launch, 'watch', '--x') as watch:
    _wait_for(lambda: _lines(launch, 'hosts_log'))
    assert tpu('stop').returncode == 0
    assert watch.wait(20) == 42, watch.stderr.read()
  assert len(launch.log()) == 1


def test_a_host_that_was_restarted_joins_again(launch, tpu):
  """Its supervisor is gone, without a status; that of the other host waits."""
  (launch.stubs / 'hosts').write_text('2')
  _does(launch, 0, 'wait')
  _does(launch, 1, 'restart', 'go')
  done = tpu('watch', '--x')
  assert done.returncode == 0, done.stderr
  starts = [line.split()[0] for line in _lines(launch, 'hosts_log')]
  assert sorted(starts) == ['w0', 'w1', 'w1']
  assert _creates(launch) == 1


def test_the_host_that_failed_says_why(launch, tpu):
  (launch.stubs / 'hosts').write_text('2')
  _does(launch, 0, 'wait')
  _does(launch, 1, 1)
  assert tpu('create').returncode == tpu('setup').returncode == 0
  assert tpu('run', '--x').returncode == 0
  done = tpu('wait')
  (launch.stubs / 'go').touch()
  assert done.returncode == 1
  assert 't1v-n-w-1: error: status 1 of host 1' in done.stderr
  assert 'status 1; see launch/tpu_vm.sh logs all, and /tmp/tpu_logs' in (
      done.stderr)


def _refuses(tpu, line, *commands):
  for command in commands:
    done = tpu(*command.split())
    assert (done.returncode, done.stderr) == (
        2, f'launch/tpu_vm.sh: error: {line}\n'), command


def test_commands_without_a_slice_say_so(launch, tpu):
  commands = ('logs', 'logs all', 'fetch runs/x', 'stop', 'run --x', 'setup')
  none = 'there is no slice n: launch/tpu_vm.sh create'
  _refuses(tpu, none, 'wait', *commands)
  done = tpu('delete')
  assert done.returncode == 0 and 'there is no slice n\n' in done.stderr
  (launch.stubs / 'state').write_text('PROVISIONING\n')
  waits = 'n is PROVISIONING: launch/tpu_vm.sh create waits for it'
  _refuses(tpu, waits, 'wait', *commands)
  (launch.stubs / 'state').write_text('SUSPENDED\n')
  remake = (
      'launch/tpu_vm.sh delete, create (with the same SPOT), setup (with the '
      'same BUCKET), and the same run, which resumes; watch, in place of run, '
      'does all this')
  _refuses(tpu, f'n is SUSPENDED: {remake}', *commands)
  done = tpu('create')
  assert (done.returncode, done.stderr.splitlines()[-1]) == (
      2, f'launch/tpu_vm.sh: error: the slice is SUSPENDED: {remake}')


def test_commands_without_a_program_say_so(launch, tpu):
  (launch.stubs / 'hosts').write_text('2')
  nothing = 'nothing was started on n: launch/tpu_vm.sh '
  assert tpu('create').returncode == 0
  _refuses(tpu, f'{nothing}setup, then run', 'wait', 'logs', 'logs all',
           'fetch runs/x', 'stop', 'run --x')
  assert tpu('setup').returncode == 0
  _refuses(tpu, f'{nothing}run', 'wait', 'logs 1', 'logs all')
  done = tpu('stop')
  assert done.returncode == 0
  assert done.stdout.count('no program is in progress\n') == 2
  done = tpu('fetch', 'runs/x')
  assert done.returncode == 1 and 'runs/x' in done.stderr
  # A host that lost its program is not one that never had any.
  assert tpu('run', '--x').returncode == tpu('wait').returncode == 0
  (launch.stubs / 'host1/tepo/job.status').unlink()
  done = tpu('wait')
  assert done.returncode == 42 and 'the same run resumes' in done.stderr


def test_a_sick_host_s_slice_is_made_anew(launch, tpu):
  """After five restarts of its supervisor; three times at most."""
  (launch.stubs / 'hosts').write_text('2')
  _does(launch, 1, *6 * [3])
  _does(launch, 0, 'wait', 'go')
  done = tpu('watch', '--x', PAUSE='0.02')
  assert done.returncode == 0, done.stderr
  assert 'making the slice anew (1 of 3)' in done.stderr
  assert _creates(launch) == 2
  (launch.stubs / 'hosts').write_text('1')
  _does(launch, 0, *30 * [3])
  done = tpu('watch', '--x', PAUSE='0.02')
  assert done.returncode == 3 and _creates(launch) == 5


_FAILED = 'FAILED|8|'
_NO_CAPACITY = f'{_FAILED}There is no more capacity in the zone "z"; you can'


@pytest.mark.parametrize('state, said', [
    (f'{_FAILED}Quota limit TPUV6EPerProjectPerZoneForTPUAPI has been exceeded',
     'Quota limit TPUV6E'),
    ("FAILED|7|Permission 'tpu.nodes.create' denied.", 'tpu.nodes.create'),
    ('FAILED|3|Runtime version is invalid.', 'is invalid'),
    ("FAILED|6|Resource 'nodes/n' already exists", 'already exists')])
def test_watch_stops_if_the_request_is_refused(launch, tpu, state, said):
  (launch.stubs / 'creates').write_text(f'{state}\n' * 30)
  done = tpu('watch', '--x')
  assert done.returncode == 2 and _creates(launch) == 1
  assert f'there will be no slice: {state.rpartition("|")[2]}' in done.stderr
  assert said in done.stderr and 'taken away' not in done.stderr


# What `gcloud compute tpus … create` prints: of a refused call, and of an
# accepted one whose operation fails.
_CREATE = 'ERROR: (gcloud.compute.tpus.queued-resources.create) '


def _http(code, status, message):
  error = {'code': code, 'message': message, 'status': status}
  return (f'{_CREATE}HttpError accessing <https://tpu.googleapis.com/v2/'
          'projects/p/locations/z/queuedResources?alt=json>: response: '
          f"<{{'status': {code}}}>, content <"
          f'{json.dumps({"error": error}, indent=2)}\n>\n'
          'This may be due to network connectivity issues. Please check your '
          'network settings, and the status of the service you are trying to '
          'reach.\n')


_FULL = ('There is no more capacity in the zone z; you can try in '
         'another zone where Cloud TPU Nodes are offered (see https://cloud.google.com/'
         'tpu/docs/regions) [EID: 0x191e4b746b2c69a9]')
_QUOTA = ("Quota limit 'TPUV6EPreemptiblePerProjectPerZoneForTPUAPI' has been "
          'exceeded. Limit: 4 in zone z.')


_CALLS = ("Quota exceeded for quota metric 'Create requests' and limit 'Create "
          "requests per minute' of service 'tpu.googleapis.com' for consumer "
          "'project_number:1'.")


@pytest.mark.parametrize('text, said', [
    (f'{_CREATE}{{\n  "code": 8,\n  "message": "{_FULL}"\n}}\n',
     'no slice now'),
    (f'{_CREATE}RESOURCE_EXHAUSTED: {_FULL}\n', 'no slice now'),
    (_http(429, 'RESOURCE_EXHAUSTED', _FULL), 'no slice now'),
    (_http(503, 'UNKNOWN', 'The service is busy.'), 'no answer from Google'),
    (f'{_CREATE}{{\n  "code": 13,\n  "message": "an error"\n}}\n',
     'no slice now'),
    (_http(429, 'RESOURCE_EXHAUSTED', _CALLS), 'no answer from Google')],
    ids=['operation', 'status', 'http', 'busy', 'failed', 'calls per minute'])
def test_watch_waits_if_create_finds_no_capacity(launch, tpu, text, said):
  (launch.stubs / 'refusal').write_text(text)
  (launch.stubs / 'refusals').write_text('3')
  done = tpu('watch', '--x', PAUSE='0')
  assert done.returncode == 0, done.stderr
  assert _creates(launch) == 4
  assert done.stderr.count(f'launch/tpu_vm.sh: {said}; ') == 3


@pytest.mark.parametrize('text', [
    f'{_CREATE}{{\n  "code": 8,\n  "message": "{_QUOTA}"\n}}\n',
    f'{_CREATE}RESOURCE_EXHAUSTED: {_QUOTA}\n',
    _http(429, 'RESOURCE_EXHAUSTED', _QUOTA),
    f'{_CREATE}INVALID_ARGUMENT: Cloud TPU received a bad request.\n',
    f'{_CREATE}{{\n  "code": 5,\n  "message": "Reservation not found"\n}}\n',
    f"{_CREATE}ALREADY_EXISTS: Resource 'nodes/n' already exists\n"],
    ids=['operation', 'status', 'http', 'invalid', 'reservation', 'node'])
def test_watch_stops_if_create_is_refused(launch, tpu, text):
  (launch.stubs / 'refusal').write_text(text)
  (launch.stubs / 'refusals').write_text('30')
  done = tpu('watch', '--x', PAUSE='0')
  assert done.returncode == 2 and _creates(launch) == 1
  assert done.stderr.endswith('error: there will be no slice: see above\n')
  assert text in done.stderr


@pytest.mark.parametrize('made, asked, said', [
    ({'TYPE': 'v6e-16'}, {}, 'TYPE=v6e-16, not TYPE=v6e-8'),
    ({'SPOT': '1'}, {}, 'TYPE=v6e-8 SPOT=1, not TYPE=v6e-8'),
    ({}, {'SPOT': '1'}, 'TYPE=v6e-8, not TYPE=v6e-8 SPOT=1')])
def test_a_slice_of_another_type_is_not_kept(launch, tpu, made, asked, said):
  assert tpu('create', **made).returncode == 0
  assert tpu('create', **made).returncode == 0
  assert tpu('setup', **made).returncode == 0
  refusal = (f'launch/tpu_vm.sh: error: n exists with {said}: change the '
             'variables, or launch/tpu_vm.sh delete first')
  for state in 'WAITING_FOR_RESOURCES', 'ACTIVE':
    (launch.stubs / 'state').write_text(f'{state}\n')
    for command in ('create',), ('watch', '--x'):
      done = tpu(*command, **asked)
      assert done.returncode == 2 and not launch.log()
      assert done.stderr.splitlines()[1:] == [refusal]
  _does(launch, 0, 'wait')
  assert tpu('run', '--x').returncode == 0
  assert tpu('watch', '--x', **asked).stderr.endswith(f'{refusal}\n')
  (launch.stubs / 'go').touch()
  assert tpu('wait').returncode == 0 and _creates(launch) == 1


def test_a_slice_that_is_there_is_asked_for_once(launch, tpu):
  """One answer has its state, TYPE and SPOT."""
  assert tpu('create').returncode == 0
  (launch.stubs / 'gcloud_log').unlink()
  assert tpu('create').returncode == 0
  assert [line.split()[2:4] for line in _lines(launch, 'gcloud_log')] == [
      ['queued-resources', 'describe'], ['tpu-vm', 'describe']]


def test_each_command_says_what_it_costs_and_what_is_next(launch, tpu):
  billed = ('its 8 chips are billed (about $22 an hour at list price) until '
            'you run launch/tpu_vm.sh delete\n')
  for command, said in [
      ('create', 'n is there; next: launch/tpu_vm.sh setup\n'),
      ('setup', 'n is set up; next: launch/tpu_vm.sh run --config='),
      ('run --x', 'train was started on n; next: launch/tpu_vm.sh logs'),
      ('wait', 'the program is complete\n')]:
    done = tpu(*command.split())
    assert done.returncode == 0 and billed in done.stderr, command
    assert said in done.stderr.splitlines(keepends=True)[-1], command
  done = tpu('delete')
  assert done.stderr == 'launch/tpu_vm.sh: n is deleted\n'
  assert 'v6e-1 is 1 chip on 1 host\n' in tpu('create', TYPE='v6e-1').stderr
  done = tpu('setup', TYPE='v6e-1', SPOT='1')
  assert ('its 1 chip is billed (about $3 an hour at list price, less with '
          'SPOT=1) until' in done.stderr)


def test_watch_waits_longer_and_longer_for_capacity(launch, tpu):
  (launch.stubs / 'creates').write_text(3 * f'{_NO_CAPACITY}\n')
  sleep = launch.stubs / 'sleep'
  sleep.write_text('#!/bin/bash\necho "$1" >>"$STUBS/slept"\n'
                   'exec /bin/sleep .05\n')
  sleep.chmod(0o755)
  done = tpu('watch', '--x', PAUSE='3')
  assert done.returncode == 0, done.stderr
  assert _creates(launch) == 4
  assert done.stderr.count('n is FAILED: There is no more capacity') == 3
  assert [n for n in _lines(launch, 'slept') if int(n) > 3] == ['6', '12']


def test_setup_mounts_the_bucket(launch, tpu):
  for name, text in {
      'curl': 'echo key', 'lsb_release': 'echo jammy',
      'tee': 'cat >"$STUBS/$$"',
      'findmnt': 'cat "$STUBS/mounted" 2>/dev/null',
      'fusermount': 'echo "fusermount $*" >>"$STUBS/log"; rm "$STUBS/mounted"',
      'apt-get': 'echo "apt-get $*" >>"$STUBS/log"; [[ $* != *install* ]] || '
                 'mv "$STUBS/fuse" "$STUBS/gcsfuse"',
      'fuse': 'echo "gcsfuse $*" >>"$STUBS/log"; echo "$3" >"$STUBS/mounted"'
  }.items():
    (launch.stubs / name).write_text(f'#!/bin/bash\n{text}\n')
    (launch.stubs / name).chmod(0o755)
  assert tpu('create').returncode == 0
  for bucket in 'b', 'b', 'other':
    done = tpu('setup', BUCKET=bucket)
    assert done.returncode == 0, done.stderr
  assert launch.log() == [
      'apt-get update -qq',
      'apt-get -o DPkg::Lock::Timeout=600 install -y -qq gcsfuse',
      'gcsfuse --implicit-dirs --rename-dir-limit=1000000 b bucket',
      'fusermount -u bucket',
      'gcsfuse --implicit-dirs --rename-dir-limit=1000000 other bucket']
  (launch.stubs / 'does0').write_text('wait\n')
  assert tpu('run', '--workdir=bucket/x').returncode == 0
  done = tpu('setup', BUCKET='b')
  assert done.returncode != 0
  assert not any('fuse' in line for line in launch.log())
  assert 'a program uses bucket/, which is other: stop it' in done.stderr
  (launch.stubs / 'go').touch()
  assert tpu('wait').returncode == 0


def test_a_host_whose_setup_fails_is_tried_again(launch, tpu):
  (launch.stubs / 'hosts').write_text('2')
  assert tpu('create').returncode == 0
  down = launch.stubs / 'host1/down'
  down.touch()
  done = tpu('setup')
  assert done.returncode == 2
  assert done.stderr.count('trying again') == 4
  assert 'its 8 chips are billed (about $22 an hour at list price) until you ' \
      'run launch/tpu_vm.sh delete' in done.stderr
  down.unlink()
  assert tpu('setup').returncode == 0


@pytest.mark.parametrize('times', [1, 2, 3])
def test_only_the_hosts_whose_setup_failed_are_tried_again(launch, tpu, times):
  """Hosts that do not take the archive, or run the setup, or both and again."""
  (launch.stubs / 'hosts').write_text('4')
  assert tpu('create').returncode == tpu('setup').returncode == 0
  for host in 1, 3:
    (launch.stubs / f'host{host}/down').write_text(f'{times}\n')
  (launch.stubs / 'gcloud_log').unlink()
  (launch.root / 'own.py').touch()
  done = tpu('setup')
  assert done.returncode == 0, done.stderr
  assert 'launch/tpu_vm.sh: not set up: host 1,3\n' in done.stderr
  reached = [re.search(r'--worker=(\S+)', line)[1]
             for line in _lines(launch, 'gcloud_log') if 'worker' in line]
  assert reached == ['all'] * 2 + ['1,3'] * (2 if times < 3 else 4)
  for host in range(4):
    folder = launch.stubs / f'host{host}'
    assert (folder / 'tepo/own.py').exists()
    assert not list(folder.glob('*.tgz'))


def test_gcloud_s_key_is_added_to_a_running_agent(launch, tpu, tmp_path):
  key = tmp_path / '.ssh/google_compute_engine'
  key.parent.mkdir()
  key.touch()
  agent = launch.stubs / 'ssh-add'
  agent.write_text('#!/bin/bash\necho "ssh-add $*" >>"$STUBS/log"; exit 2\n')
  agent.chmod(0o755)
  assert tpu('create').returncode == tpu('setup').returncode == 0
  assert launch.log() == [f'ssh-add -q {key}']


def test_programs_run_on_a_slice_one_after_the_other(launch, tpu):
  assert tpu('create').returncode == tpu('setup').returncode == 0
  assert tpu('run', 'evaluate', '--out=runs/e').returncode == 0
  (launch.stubs / 'errors').write_text(2 * _UNREACHED)
  assert tpu('wait').returncode == 0
  assert tpu('fetch', 'runs/e').returncode == 0
  assert (launch.root / 'runs/e/results.json').read_text() == 'done\n'
  assert tpu('run', '--config.seed=7').returncode == 0
  assert tpu('wait').returncode == 1
  assert launch.log() == ['1 -m tepo_jax.evaluate --out=runs/e',
                          '1 -m tepo_jax.train --config.seed=7']


def test_the_readme_leads_from_an_empty_project_to_results(launch, tpu):
  """Its command blocks as one script on stdin, which ssh must not read. Reading
  logs would not end."""
  text = (ROOT / 'launch/README.md').read_text('utf-8')
  section = text.partition('## TPU')[2].partition('\n## ')[0]
  script = '\n'.join(re.findall(r'^```\n(.*?)^```$', section, re.M | re.S))
  script = re.sub(r'(?m)^launch/tpu_vm.sh logs.*$',
                  'timeout 1 launch/tpu_vm.sh logs || true', script)
  done = subprocess.run(
      ['bash', '-euo', 'pipefail', '-s'], input=script, cwd=launch.root,
      text=True, capture_output=True, timeout=60, env={
          'PATH': f'{launch.stubs}:{os.environ["PATH"]}', 'PAUSE': '.1',
          'STUBS': str(launch.stubs)})
  assert done.returncode == 0, done.stderr
  assert [line.split()[2] for line in launch.log()] == [
      'tepo_jax.train', 'tepo_jax.evaluate', 'tepo_jax.export']
  said = '\n'.join(_lines(launch, 'gcloud_log'))
  for role in 'objectAdmin', 'legacyBucketReader':
    assert re.search('add-iam-policy-binding gs://my-bucket --member=service'
                     'Account:123-compute@.* --role=roles/storage.' + role,
                     said)
  assert not (launch.stubs / 'state').exists()  # nothing is billed


def test_tpu_vm_waits_for_the_slice(launch, tpu):
  (launch.stubs / 'creates').write_text('WAITING_FOR_RESOURCES\n')
  with _begin(launch, 'create') as create:
    for line in 'v6e-8 is 8 chips on 1 host', 'n is WAITING_FOR_RESOURCES':
      assert create.stderr.readline() == f'launch/tpu_vm.sh: {line}\n'
    (launch.stubs / 'state').write_text('ACTIVE\n')
    assert create.stderr.readline().endswith('n is ACTIVE\n')
    assert create.wait(20) == 0
  (launch.stubs / 'state').write_text('FAILED|13|Internal error\n')
  done = tpu('create')
  assert done.returncode == 2 and 'FAILED: Internal error' in done.stderr
  assert _creates(launch) == 1


@pytest.mark.parametrize('arguments, without, said', [
    ((), '', 'usage'), (('fly',), '', 'usage'), (('create', 'x'), '', "'x'"),
    (('run',), '', 'arguments'), (('run', 'evaluate'), '', 'arguments'),
    (('watch', '--x'), 'TYPE', 'TYPE is not set'),
    (('fetch',), '', 'path'), (('logs', 'x'), '', 'logs takes'),
    (('create',), 'ZONE', 'ZONE is not set'),
    (('create',), 'TYPE', 'TYPE is not set')])
def test_tpu_vm_refuses(launch, arguments, without, said):
  environment = {k: v for k, v in launching.SLICE.items() if k != without}
  done = launch('tpu_vm.sh', '--dry-run', *arguments, **environment)
  assert done.returncode == 2 and said in done.stderr
  assert not done.stdout and done.stderr.count('\n') == 1


@pytest.mark.parametrize('type_, said', [
    ('v5e-8', 'v5litepod-8'), ('tpu7x-8', 'use GKE'), ('v7x-8', 'use GKE'),
    ('v6e', 'not like v6e-16'), ('v6e:4x4', 'v6e-16')])
def test_tpu_vm_refuses_a_type(launch, type_, said):
  done = launch('tpu_vm.sh', '--dry-run', 'create', **launching.SLICE | {
      'TYPE': type_})
  assert done.returncode == 2 and said in done.stderr


def test_tpu_vm_refuses_several_slices(launch):
  done = launch('tpu_vm.sh', '--dry-run', 'create', **launching.SLICE,
                CREATE_FLAGS='--node-count=2')
  assert done.returncode == 2 and 'several slices' in done.stderr


def test_types_are_counted_in_chips_and_hosts(launch):
  done = launch('tpu_vm.sh', 'types')
  assert done.returncode == 0, done.stderr
  rows = {line.split()[0]: line.split(maxsplit=4)
          for line in done.stdout.splitlines()[1:]}
  for name, chips, hosts, topology in [
      ('v6e-8', '8', '1', 'v6e:2x4'), ('v6e-16', '16', '4', 'v6e:4x4'),
      ('v5p-8', '4', '1', 'v5p:2x2x1'), ('v5p-32', '16', '4', 'v5p:2x2x4'),
      ('v5litepod-8', '8', '1', 'v5e:2x4')]:
    assert rows[name][1:4] == [chips, hosts, topology]
  # What was planned: its figures change with each planning, its form does not.
  seconds = r'([\d.]+ to [\d.]+, )?[\d.]+ s'
  for name, planned in [
      ('v6e-16', f'qwen2_5_7b: {seconds}'),
      ('v5p-32', f'r1_llama_8b: {seconds}'),
      ('v6e-1', f'qwen2_5_0_5b: {seconds}(; [a-z0-9_ A-Z]+: {seconds})*'),
      ('v5litepod-8', f'qwen2_5_7b with LoRA: {seconds}; .*')]:
    assert re.fullmatch(planned, rows[name][4]), rows[name][4]


@pytest.mark.parametrize('machine, planned', [
    ('v6e16', 'qwen2_5_7b: 80 to 130, 100 s'),
    ('v5e8', 'qwen2_5_7b with LoRA: 500 to 800, 630 s'),
    ('v6e1', 'qwen2_5_0_5b: 8.1 to 15, 12 s; '
             'qwen2_5_3b with LoRA: 40 to 70, 55 s'), ('v5e1', '')])
def test_types_reads_the_tables_of_plans(tmp_path, machine, planned):
  """As launch/plans.sh prints them: a range, and the most likely."""
  head = ('of GiB | GiB | slots | step, s | run, h | lora: GiB | lora: slots | '
          'lora: step, s | lora: run, h |\n' + '|---' * 10 + '|\n')
  no, none = '**40.4 decode** | | does not fit | |', ' | | | |'

  def row(name, *cells):
    return f'| `{name}` | 31.2 | {" ".join(cells)}\n'

  def cells(span, middle):
    return (f'20.1 update | 512 | **{span}**, {middle} (7.0 + 1 + 3) | '
            '2.0 to 3.5 |')

  (tmp_path / 'launch').mkdir()
  (tmp_path / 'launch/PLANS.md').write_text(
      f"| The paper's models | {head}"
      + row('qwen2_5_7b,v6e16', cells('80 to 130', 100), none)
      + row('qwen2_5_7b,v5e8', none, cells('500 to 800', 630))
      + f'\n| GSM8K | {head}'
      + row('qwen2_5_0_5b,v6e1', cells('8.1 to 15', 12), cells('9 to 16', 13))
      + row('qwen2_5_3b,v6e1', no, cells('40 to 70', 55))
      + row('qwen2_5_3b,v5e1', no, no)
      + f'\n| DAPO-Math | {head}'
      + row('qwen2_5_0_5b,v6e1', cells('60 to 99', 80), none))
  types = ROOT / 'launch/tpu_types.sh'
  done = subprocess.run(
      ['bash', '-c', f'source {shlex.quote(str(types))}; planned {machine}'],
      cwd=tmp_path, check=True, capture_output=True, text=True)
  assert done.stdout.strip() == planned
