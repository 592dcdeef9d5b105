"""launch/*.sh, with stand-ins for python, apt-get, nvidia-smi and gcloud."""

import collections
import functools
import gzip
import io
import os
import pathlib
import re
import shlex
import shutil
import stat
import subprocess
import tarfile
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / 'launch').glob('*.sh')) + [ROOT / '.ci' / 'run']

_PYTHON = '''#!/bin/bash
case "$*" in
  *"import ensurepip"*) [[ -e "$STUBS/venv_is_there" ]] ;;
  *"%d.%d-venv"*) echo python3.11-venv ;;
  "-c"*) exit 0 ;;
  "--version") echo Python 3.11 ;;
  "-m venv --clear .venv")
    mkdir -p .venv/bin && cp "$STUBS/venv_python" .venv/bin/python ;;
esac
'''
_VENV_PYTHON = '''#!/bin/bash
case "$*" in
  "-m pip --version") ;;
  "-m pip show"*) exit 1 ;;
  *) echo "python $*" >>"$STUBS/log"
     [[ "$*" != *"pip install"* ]] || echo "a warning of pip" | tee /dev/stderr
     [[ ! -e "$STUBS/pip_fails" ]] ;;
esac
'''
_APT = '#!/bin/bash\necho "apt-get $*" >>"$STUBS/log"\ntouch "$STUBS/$APT_DOES"'
_DRIVER = '#!/bin/bash\n[[ -n $DRIVER ]] && echo "$DRIVER"'


@pytest.fixture(name='launch')
def _launch(tmp_path):
  """Runs a script of a copy of the repository, from another folder."""
  root, stubs = tmp_path / 'a folder', tmp_path / 'stubs'
  for name in ('launch', 'requirements.txt', 'tests/requirements.txt'):
    copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    copy(ROOT / name, root / name)
  stubs.mkdir()
  for name, text in {'python3': _PYTHON, 'venv_python': _VENV_PYTHON,
                     'apt-get': _APT, 'nvidia-smi': _DRIVER,
                     'sudo': '#!/bin/bash\n"$@"'}.items():
    (stubs / name).write_text(text)
    (stubs / name).chmod(0o755)

  def launch(script, *arguments, **environment):
    return subprocess.run(
        [root / 'launch' / script, *arguments], cwd='/', text=True,
        capture_output=True, timeout=60,
        env={'PATH': f'{stubs}:{os.environ["PATH"]}', 'STUBS': str(stubs),
             'HOME': str(tmp_path), 'APT_DOES': 'venv_is_there'} | environment)

  def log():
    path = stubs / 'log'
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines

  launch.root, launch.stubs, launch.log = root, stubs, log
  return launch


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_well_formed(script):
  assert script.stat().st_mode & stat.S_IXUSR
  assert 'set -euo pipefail' in script.read_text()
  subprocess.run(['bash', '-n', script], check=True)
  if shutil.which('shellcheck'):
    subprocess.run(['shellcheck', '--severity=warning', script], check=True)


def test_setup_of_a_fresh_machine(launch):
  done = launch('setup.sh', 'cpu')
  assert done.returncode == 0, done.stderr
  assert 'of pip' not in done.stdout + done.stderr
  assert launch.log() == [
      'apt-get update -qq', 'apt-get install -y -qq python3.11-venv',
      'python -m pip install --quiet --disable-pip-version-check --constraint'
      ' launch/constraints.txt -r requirements.txt']


def test_setup_skips_what_is_up_to_date(launch):
  (launch.stubs / 'venv_is_there').touch()
  for kind in (['cpu'], ['cpu', 'tests']):
    assert launch('setup.sh', *kind).returncode == 0
    assert launch.log()
    assert launch('setup.sh', *kind).returncode == 0
    assert not launch.log()
  with (launch.root / 'requirements.txt').open('a') as file:
    file.write('another==1\n')
  assert launch('setup.sh', 'cpu').returncode == 0
  assert len(launch.log()) == 1


def test_setup_installs_the_compilers_of_plans(launch):
  """That for GPUs in a folder that no other program reads."""
  (launch.stubs / 'venv_is_there').touch()
  assert launch('setup.sh', 'cpu', 'plan').returncode == 0
  tpu, gpu = launch.log()[-2:]
  assert re.search(r' libtpu==\S+$', tpu)
  assert gpu.endswith('--no-deps --upgrade --target .venv/gpu_compiler'
                      ' -r launch/gpu_compiler.txt')
  assert launch('setup.sh', 'gpu', 'tests', DRIVER='590').returncode == 0
  assert not any('gpu_compiler' in line for line in launch.log())


def test_setup_without_venv_says_what_to_do(launch):
  for apt in (_APT, '#!/bin/bash\nexit 1'):
    (launch.stubs / 'apt-get').write_text(apt)
    done = launch('setup.sh', 'cpu', APT_DOES='nothing_useful')
    assert done.returncode == 2
    assert 'sudo apt-get install python3.11-venv' in done.stderr


def test_a_failed_install_is_repeated(launch):
  (launch.stubs / 'venv_is_there').touch()
  (launch.stubs / 'pip_fails').touch()
  done = launch('setup.sh', 'cpu')
  assert done.returncode == 2 and 'pip could not install' in done.stderr
  assert 'a warning of pip' in done.stderr
  (launch.stubs / 'pip_fails').unlink()
  launch.log()
  assert launch('setup.sh', 'cpu').returncode == 0
  assert len(launch.log()) == 1


@pytest.mark.parametrize('kind, driver, extra', [
    ('gpu', '590.48.01', 'cuda13'), ('gpu', '570.12', 'cuda12'),
    ('tpu', '', 'tpu')])
def test_setup_of_accelerators(launch, kind, driver, extra):
  (launch.stubs / 'venv_is_there').touch()
  assert launch('setup.sh', kind, DRIVER=driver).returncode == 0
  *_, installs, tests = launch.log()
  assert installs.endswith(f'-r requirements.txt jax[{extra}]==0.10.2')
  assert tests == f'python -m tepo_jax.selftest --device={kind}'
  assert launch('setup.sh', kind, DRIVER=driver).returncode == 0
  assert not launch.log()


@pytest.mark.parametrize('arguments', [[], ['xpu'], ['cpu', 'test'],
                                       ['cpu', 'tests', 'more'],
                                       ['gpu', 'plan'], ['gpu']])
def test_setup_refuses(launch, arguments):
  (launch.stubs / 'venv_is_there').touch()
  done = launch('setup.sh', *arguments, DRIVER='')
  assert done.returncode == 2
  said = 'no NVIDIA driver' if arguments == ['gpu'] else 'usage'
  assert said in done.stderr


@pytest.mark.parametrize('environment, arguments', [
    ({}, '--config=configs/tiny.py:tepo --config.seed=0'
     ' --workdir=runs/tiny_tepo_0 --config.steps=2'),
    ({'METHOD': 'grpo', 'SEED': '3'}, '--config=configs/tiny.py:grpo'
     ' --config.seed=3 --workdir=runs/tiny_grpo_3 --config.steps=2'),
    ({'WORKDIR': '/a b'}, '--config=configs/tiny.py:tepo --config.seed=0'
     ' --workdir=/a b --config.steps=2')])
def test_local_trains(launch, environment, arguments):
  (launch.stubs / 'venv_is_there').touch()
  done = launch('local.sh', '--config.steps=2', **environment)
  assert done.returncode == 0, done.stderr
  assert launch.log()[-1] == f'python -m tepo_jax.train {arguments}'


def test_sweep_runs_every_method_and_seed_and_reports(launch):
  done = launch('sweep.sh', 'tiny', '--config.steps=3', '--config.x=a b',
                METHODS='tepo grpo', SEEDS='4 5', OUT='a study')
  assert done.returncode == 0, done.stderr
  commands = [line for line in launch.log() if 'tepo_jax' in line]
  assert commands[0] == ('python -m tepo_jax.pretrain '
                         '--config=configs/tiny.py --out=a study/base_model')
  assert commands[-1] == ('python -m tepo_jax.report --runs=a study/runs/* '
                          '--out=a study/report')
  assert sorted(commands[1:-1]) == sorted(
      f'python -m tepo_jax.train --config=configs/tiny.py:{method} '
      f'--config.seed={seed} --config.model=a study/base_model '
      f'--workdir=a study/runs/{method}_{seed} --config.eval.period=4 '
      '--config.steps=3 '
      '--config.x=a b' for method in ('tepo', 'grpo') for seed in (4, 5))


def test_sweep_map_makes_the_grid_then_the_best_rates_seeds(launch):
  """Without what the map has; the stand-in for the report chooses nothing, so
  best.txt is of an earlier report."""
  report = launch.root / 'runs' / 'map' / 'report'
  report.mkdir(parents=True)
  (report / 'best.txt').write_text(
      'tepo,method.reg.coef=10@1e-4@8@0\ntepo,method.reg.coef=10@3e-5@16@0\n'
      'gpg@3e-5@16@0\n')  # not of METHODS
  with gzip.open(launch.root / 'old.jsonl.gz', 'wt') as file:
    file.write('{"name": "grpo@3e-5@8@0", "seed": 0}\n')
    file.writelines(f'{{"name": "{i}", "seed": 0}}\n' for i in range(100_000))
  sweep = functools.partial(
      launch, 'sweep.sh', 'map', '--config.steps=3', SEEDS='1 2',
      METHODS='grpo tepo,method.reg.coef=10', RATES='3e-5 1e-4', UPDATES='8 16',
      SEED_RATES='1e-4 3e-5', MAP='old.jsonl.gz')
  done = sweep()
  assert done.returncode == 0, done.stderr
  log = launch.log()
  trained = [dict(word.removeprefix('--').split('=', 1)
                  for word in line.split()[3:])
             for line in log if 'tepo_jax.train' in line]
  names = {run['workdir'].removeprefix('runs/map/runs/') for run in trained}
  assert names == {
      f'{method}@{rate}@{count}@0' for count in (8, 16)
      for rate in ('3e-5', '1e-4')
      for method in ('grpo', 'tepo,method.reg.coef=10')} - {'grpo@3e-5@8@0'} | {
          f'tepo,method.reg.coef=10@{rate}@16@{seed}'
          for rate in ('1e-4', '3e-5') for seed in (1, 2)}
  assert len(trained) == len(names)
  for run in trained:
    method, rate, count, seed = run['workdir'].rpartition('/')[2].split('@')
    assert run['config'] == f'configs/countdown.py:{method.split(",")[0]}'
    assert run['config.optimizer.learning_rate'] == rate
    assert 64 / int(run['config.train.minibatch_prompts']) == int(count)
    assert run['config.seed'] == seed and run['config.steps'] == '3'
    assert run['config.dump.period'] == '1'  # the map reads all quarters
    assert ('config.method.reg.coef' in run) == ('coef' in method)
  assert {line.split(' ', 3)[3] for line in log if 'tepo_jax.report' in line
          } == {'--map=old.jsonl.gz --out=runs/map/report'}  # no run is here
  for seed in 0, 1:
    (report.parent / f'runs/grpo@1e-4@8@{seed}').mkdir(parents=True)
  assert sweep().returncode == 0
  *added, curves = (line.split(' ', 3)[3] for line in launch.log()
                    if 'tepo_jax.report' in line)
  assert added == 2 * ['--map=old.jsonl.gz --runs=runs/map/runs/* '
                       '--out=runs/map/report']
  assert curves == '--runs=runs/map/seeds/* --out=runs/map/report'
  assert [path.name for path in (report.parent / 'seeds').iterdir()] == [
      'grpo@1e-4@8@1']


def test_sweep_measures_the_mechanism(launch):
  done = launch('sweep.sh', 'mechanism', '--config.seed=1', OUT='a study')
  assert done.returncode == 0, done.stderr
  assert [line for line in launch.log() if 'tepo_jax' in line] == [
      'python -m tepo_jax.pretrain --config=configs/countdown.py '
      '--out=a study/base_model',
      'python -m tepo_jax.mechanism --config=configs/countdown.py:grpo '
      '--config.model=a study/base_model --out=a study/results '
      '--config.seed=1']


def test_sweep_makes_the_whole_study(launch):
  """The stand-in for the report chooses no rates; no run gets into a map."""
  for part in 'map', 'long':
    report = launch.root / 'out' / part / 'report'
    report.mkdir(parents=True)
    (report / 'best.txt').write_text('tepo@3e-5@32@0\n')
  done = launch('sweep.sh', 'study', '--config.steps=3', OUT='out')
  assert done.returncode == 0, done.stderr
  log = launch.log()
  trained = [line for line in log if 'tepo_jax.train' in line]
  parts = [line.partition('--workdir=out/')[2].split('/')[0]
           for line in trained]
  assert collections.Counter(parts) == {
      'study': 6 * 5, 'map': 7 * 4 * 3 + 5 + 4 * 4 * 3 + 2 * 5, 'long': 4}
  assert all('--config.steps=3' in line for line in trained)
  assert all(('--config.data.name=countdown:4' in line) == (part == 'long')
             for line, part in zip(trained, parts))
  assert 'tepo_jax.mechanism' in log[-1] and '--out=out/mechanism' in log[-1]
  # A run that stops, as gpg does at a high rate, does not stop the study.
  python = launch.root / '.venv/bin/python'
  python.write_text(python.read_text().replace(
      '[[ ! -e "$STUBS/pip_fails" ]]', '[[ "$*" != *gpg@3e-4@* ]]'))
  done = launch('sweep.sh', 'study', MAP='out/other', SEEDS='9', OUT='out')
  assert done.returncode == 1
  assert launch.log()[-1] == log[-1].removesuffix(' --config.steps=3')


def test_test_passes_its_arguments_on(launch):
  (launch.stubs / 'venv_is_there').touch()
  assert launch('test.sh', '-k', 'mesh').returncode == 0
  command = launch.log()[-1]
  assert command.startswith('python -m pytest tests ')
  assert command.endswith(' -k mesh')


_SLICE = {'NAME': 'n', 'ZONE': 'z', 'PROJECT': 'p', 'TYPE': 'v6e-8'}


_TPUS = ['gcloud', 'compute', 'tpus']
_WHERE = ['--project=p', '--zone=z']


def _dry_run(launch, *arguments, **environment):
  done = launch('tpu_vm.sh', '--dry-run', *arguments, **_SLICE, **environment)
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
      resource + ['delete', 'n', '--force', '--quiet'] + _WHERE]
  ssh = _TPUS + ['tpu-vm', 'ssh', 'n']
  (*logs, _, _, _), = _dry_run(launch, 'logs')
  assert logs == ssh + ['--worker=0']
  (*wait, command, _, _), = _dry_run(launch, 'wait')
  assert wait == ssh + ['--worker=0'] and 'cat job.status' in command
  made, fetch = _dry_run(launch, 'fetch', 'runs/a/b')
  assert made == ['mkdir', '-p', 'runs/a']
  assert fetch[4:8] == ['scp', '--recurse', 'n:tepo/runs/a/b', 'runs/a']
  lines = _dry_run(launch, 'watch', '--x')
  assert lines[0] == create + _WHERE and 'tepo_jax.train --x ' in lines[-2][7]
  assert 'cat job.status' in lines[-1][7]
  (*_, command, _, _), = _dry_run(launch, 'run', 'export', '--x')
  assert '-m tepo_jax.export --x ' in command
  (*stop, command, _, _), = _dry_run(launch, 'stop')
  assert stop == ssh + ['--worker=all'] and 'kill -TERM' in command
  tar, copy, setup = _dry_run(launch, 'setup')
  assert tar[0] == 'tar' and copy[4] == 'scp' and copy[6] == 'n:tepo.tgz'
  assert '--worker=all' in copy and '--worker=all' in setup
  assert 'tepo/launch/setup.sh tpu' in setup[7]
  *_, mount = _dry_run(launch, 'setup', BUCKET='b')
  assert 'gcsfuse --implicit-dirs' in mount[7]
  assert mount[7].endswith(' b tepo/bucket; }')
  subprocess.run(['bash', '-n', '-c', mount[7].removeprefix('--command=')],
                 check=True)


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


def test_tpu_vm_runs_the_program_on_a_host(launch, tmp_path):
  """A shell runs the command that is sent to a host, with its arguments."""
  arguments = ["--config.eval.sets=('x', 'y')", '--workdir=$(id)']
  (*_, command, _, _), = _dry_run(launch, 'run', *arguments)
  command = command.removeprefix('--command=')
  host = tmp_path / 'host'
  (host / 'tepo/.venv/bin').mkdir(parents=True)
  shutil.copytree(ROOT / 'launch', host / 'tepo/launch')
  python = host / 'tepo/.venv/bin/python'
  python.write_text(
      '#!/bin/bash\nprintf "%s|" "$TEPO_MULTIHOST" "$@"\n'
      'trap "echo saved; exit 0" TERM\nwhile :; do sleep .1; done')
  python.chmod(0o755)

  def on_host(command):
    return subprocess.run(['bash', '-c', command], cwd=host, text=True,
                          capture_output=True, timeout=30)

  assert on_host(command).returncode == 0
  log = host / 'tepo/job.log'
  _wait_for(lambda: '--workdir' in log.read_text())
  assert log.read_text() == (
      "1|-m|tepo_jax.train|--config.eval.sets=('x', 'y')|--workdir=$(id)|")
  assert 'seq 30' in command  # seconds
  again = on_host(command.replace('seq 30', 'seq 1'))
  assert again.returncode == 2 and 'stop it first' in again.stderr
  (*_, stop, _, _), = _dry_run(launch, 'stop')
  assert on_host(stop.removeprefix('--command=')).returncode == 0
  _wait_for(lambda: log.read_text().endswith('saved\n'))


def test_addresses_in_a_bucket_are_passed_on_and_not_fetched(launch):
  (*_, command, _, _), = _dry_run(
      launch, 'run', '--config=c.py', '--workdir=gs://b/a run')
  assert '--config=c.py --workdir=gs://b/a\\ run >>job.log' in command
  done = launch('tpu_vm.sh', '--dry-run', 'fetch', 'gs://b/x', **_SLICE)
  assert done.returncode == 2 and not done.stdout
  assert done.stderr.endswith(': gcloud storage cp -r gs://b/x .\n')


def _wait_for(holds):
  deadline = time.monotonic() + 20
  while not holds():
    assert time.monotonic() < deadline
    time.sleep(0.05)


_SLICE_STUB = r"""#!/bin/bash
# A slice of one host, $STUBS/host; $STUBS/state is missing if there is none. As
# many calls as $STUBS/lost says fail.
echo "$4 $3" >>"$STUBS/gcloud_log"
lost=$(cat "$STUBS/lost" 2>/dev/null || echo 0)
if (( lost > 0 )); then echo $((lost - 1)) >"$STUBS/lost"; exit 1; fi
state() { cat "$STUBS/state" 2>/dev/null || { echo NOT_FOUND >&2; exit 1; }; }
case "$*" in
  *describe*) state ;;
  *create*) mkdir -p "$STUBS/host"; echo ACTIVE >"$STUBS/state" ;;
  *delete*) rm -rf "$STUBS/state" "$STUBS/host" ;;
  *" ssh "*)
    [[ $(state 2>&1) == ACTIVE ]] || exit 255
    for argument; do case $argument in --command=*)
      status=0
      (cd "$STUBS/host" && bash -c "${argument#--command=}") || status=$? ;;
    esac; done
    [[ $(state 2>&1) == ACTIVE ]] || exit 255
    exit $status ;;
  *" scp --recurse "*) cp -r "$STUBS/host/${6#n:}" "$7" ;;
  *" scp "*) cp "$5" "$STUBS/host/${6#n:}" ;;
esac
"""
# Is taken away with the slice, as often as $STUBS/taken says.
_PROGRAM = r"""#!/bin/bash
[[ "$*" == *tepo_jax* ]] || exit 0
echo "$TEPO_MULTIHOST $*" >>"$STUBS/log"
left=$(cat "$STUBS/taken" 2>/dev/null || echo 0)
if (( left > 0 )); then
  echo $((left - 1)) >"$STUBS/taken"
  echo SUSPENDED >"$STUBS/state"
fi
for argument; do case $argument in --out=*)
  mkdir -p "${argument#--out=}"; echo done >"${argument#--out=}/results.json" ;;
esac; done
[[ "$*" != *seed=7* ]]
"""


@pytest.fixture(name='tpu')
def _tpu(launch):
  """Runs tpu_vm.sh with a stand-in for gcloud that runs what hosts are sent."""
  for name, text in (('gcloud', _SLICE_STUB), ('venv_python', _PROGRAM)):
    (launch.stubs / name).write_text(text)
    (launch.stubs / name).chmod(0o755)
  for name in ('tepo_jax', 'configs', 'tests'):
    (launch.root / name).mkdir(exist_ok=True)
  (launch.stubs / 'venv_is_there').touch()
  return lambda *arguments: launch(
      'tpu_vm.sh', *arguments, **_SLICE, PAUSE='0.1')


def test_a_slice_that_is_taken_away_is_made_again(launch, tpu):
  (launch.stubs / 'taken').write_text('2')
  done = tpu('watch', '--workdir=bucket/a run')
  assert done.returncode == 0, done.stderr
  assert launch.log() == 3 * [
      '1 -m tepo_jax.train --workdir=bucket/a run']
  assert done.stderr.count('n was taken away') == 2
  # The program's own failure is none of the slice's, and neither is a lost
  # connection.
  log = launch.stubs / 'gcloud_log'
  made = log.read_text().count('create')
  (launch.stubs / 'lost').write_text('1')
  done = tpu('watch', '--config.seed=7')
  assert done.returncode == 1 and len(launch.log()) == 1
  assert log.read_text().count('create') == made
  assert 'taken away' not in done.stderr


def test_programs_run_on_a_slice_one_after_the_other(launch, tpu):
  assert tpu('create').returncode == tpu('setup').returncode == 0
  assert tpu('run', 'evaluate', '--out=runs/e').returncode == 0
  (launch.stubs / 'lost').write_text('2')
  assert tpu('wait').returncode == 0
  assert tpu('fetch', 'runs/e').returncode == 0
  assert (launch.root / 'runs/e/results.json').read_text() == 'done\n'
  assert tpu('run', '--config.seed=7').returncode == 0
  assert tpu('wait').returncode == 1
  assert launch.log() == ['1 -m tepo_jax.evaluate --out=runs/e',
                          '1 -m tepo_jax.train --config.seed=7']


def test_sweep_on_a_slice(launch, tpu, sweep):
  assert tpu('create').returncode == tpu('setup').returncode == 0
  launch.log()
  where = _SLICE | {'RUNS': 'bucket/r', 'PAUSE': '0.1'}
  done = sweep('--slice', 'table3', **where)
  assert done.returncode == 0, done.stderr
  assert launch.log() == [line.replace('=r', '=bucket/r') for line in (
      *(line.replace('python', '1', 1) for line in (
          _TRAIN, _EVALUATE, _UNTRAINED)), _REPORT)]
  for name in 'eb':  # what the report reads
    assert (launch.root / 'bucket/r' / name / 'results.json').exists()
  assert sweep('--slice', 'table3', **where | {'RUNS': 'gs://b/r'}
               ).returncode == 0  # without fetching, which is refused
  done = sweep('--slice', 'table3', **where | {'RUNS': 'runs'})
  assert done.returncode == 2 and 'RUNS=gs://BUCKET/FOLDER' in done.stderr
  done = sweep('--dry-run', '--slice', 'table3', **where)
  assert [line.split()[:3] for line in done.stdout.splitlines()] == [
      ['launch/tpu_vm.sh', 'run', program]
      for program in ('train', 'evaluate', 'evaluate')]


def test_tpu_vm_waits_for_the_slice(launch):
  gcloud = launch.stubs / 'gcloud'
  gcloud.write_text("""#!/bin/bash
echo "$*" >>"$STUBS/log"
case "$*" in
  *create*) touch "$STUBS/asked" ;;
  *describe*)
    [[ -e $STUBS/asked ]] || { echo NOT_FOUND >&2; exit 1; }
    [[ -e $STUBS/once ]] && echo "${STATE:-ACTIVE}" || echo WAITING
    touch "$STUBS/once" ;;
esac
""")
  gcloud.chmod(0o755)
  done = launch('tpu_vm.sh', 'create', **_SLICE, PAUSE='0')
  assert done.returncode == 0, done.stderr
  said = done.stderr.splitlines()
  assert [line.split()[-1] for line in said] == ['WAITING', 'ACTIVE']
  assert [line.split()[3] for line in launch.log()] == [
      'describe', 'create', 'describe', 'describe']
  done = launch('tpu_vm.sh', 'create', **_SLICE, PAUSE='0', STATE='FAILED')
  assert done.returncode == 2 and 'FAILED' in done.stderr
  assert 'create' not in {line.split()[3] for line in launch.log()}


@pytest.mark.parametrize('script', ['gpu.sh', 'tpu_vm.sh'])
@pytest.mark.parametrize('flag', ['--help', '-h'])
def test_help_is_the_script_s_head(launch, script, flag):
  done = launch(script, flag)
  assert done.returncode == 0 and not done.stderr and not launch.log()
  assert f'  launch/{script} ' in done.stdout and '#' not in done.stdout
  head = (launch.root / 'launch' / script).read_text().partition('\nset ')[0]
  assert done.stdout.splitlines() == [
      line.removeprefix('#').removeprefix(' ')
      for line in head.splitlines()[1:]]


@pytest.mark.parametrize('arguments, without, said', [
    ((), '', 'usage'), (('fly',), '', 'usage'), (('create', 'x'), '', "'x'"),
    (('run',), '', 'arguments'), (('run', 'evaluate'), '', 'arguments'),
    (('watch', '--x'), 'TYPE', 'TYPE is not set'), (('fetch',), '', 'path'), (('create',), 'ZONE', 'ZONE is not set'),
    (('create',), 'TYPE', 'TYPE is not set')])
def test_tpu_vm_refuses(launch, arguments, without, said):
  environment = {k: v for k, v in _SLICE.items() if k != without}
  done = launch('tpu_vm.sh', '--dry-run', *arguments, **environment)
  assert done.returncode == 2 and said in done.stderr
  assert not done.stdout and done.stderr.count('\n') == 1


def test_tpu_vm_says_gcloud_s_name_of_a_v5e(launch):
  done = launch('tpu_vm.sh', '--dry-run', 'create', **_SLICE | {
      'TYPE': 'v5e-8'})
  assert done.returncode == 2 and 'v5litepod-8' in done.stderr


@pytest.mark.parametrize('statuses, restarts, ends, starts', [
    ([0], 5, 0, 1), ([2], 5, 2, 1), ([1], 5, 1, 1), ([134, 3, 0], 5, 0, 3),
    ([3, 3, 3], 1, 3, 2)])
def test_supervise_restarts_after_a_loss(
    launch, tmp_path, statuses, restarts, ends, starts):
  (tmp_path / 'statuses').write_text('\n'.join(map(str, statuses)) + '\n')
  program = (f'cd {shlex.quote(str(tmp_path))}; echo start >>log; '
             'status=$(head -n 1 statuses); sed -i 1d statuses; exit $status')
  done = launch('supervise.sh', 'bash', '-c', program,
                RESTARTS=str(restarts), PAUSE='0')
  assert done.returncode == ends
  assert (tmp_path / 'log').read_text().count('start') == starts


def test_gpu_on_several_hosts(launch):
  done = launch('gpu.sh', '--workdir=/a b', HOSTS='one two', DRY_RUN='1')
  assert done.returncode == 0, done.stderr
  commands = [shlex.split(line) for line in done.stdout.splitlines()]
  assert [command[:2] for command in commands] == [['ssh', 'one'],
                                                   ['ssh', 'two']]
  for index, (_, _, command) in enumerate(commands):
    assert 'JAX_COORDINATOR_ADDRESS=one:12355' in command
    assert f'JAX_NUM_PROCESSES=2 JAX_PROCESS_ID={index} ' in command
    assert "launch/gpu.sh --workdir=/a\\ b " in command
    assert f'>>train.{index}.log' in command


@pytest.mark.parametrize('environment, multihost', [
    ({}, ''), ({'SLURM_JOB_ID': '7'}, '1'),
    ({'JAX_COORDINATOR_ADDRESS': 'one:1'}, '1')])
def test_gpu_joins_the_other_processes(launch, environment, multihost):
  (launch.stubs / 'venv_is_there').touch()
  python = launch.stubs / 'venv_python'
  python.write_text(_VENV_PYTHON.replace(
      'python $*', 'python $* multihost=$TEPO_MULTIHOST'))
  done = launch('gpu.sh', '--x', DRIVER='580.1', **environment)
  assert done.returncode == 0, done.stderr
  assert launch.log()[-1] == (
      f'python -m tepo_jax.train --x multihost={multihost}')


_SWEEP_PYTHON = r'''#!/bin/bash
case "$*" in
  "-m tepo_jax.report"*--commands)
    echo "tepo_jax.train --config=c.py:a --workdir=$RUNS/a"
    echo "tepo_jax.evaluate --config=c.py:a --checkpoint=$RUNS/a --out=$RUNS/e"
    echo "tepo_jax.evaluate --config=c.py:b --out=$RUNS/b" ;;
  *) echo "python $*" >>"$STUBS/log"
     [[ ! -e "$STUBS/fails" || "$*" != *tepo_jax.train* ]] ;;
esac
'''


@pytest.fixture(name='sweep')
def _sweep(launch):
  python = launch.root / '.venv' / 'bin' / 'python'
  python.parent.mkdir(parents=True)
  python.write_text(_SWEEP_PYTHON)
  python.chmod(0o755)
  return lambda *arguments, **environment: launch(
      'sweep.sh', *arguments, **({'RUNS': 'r'} | environment))


_TRAIN = 'python -m tepo_jax.train --config=c.py:a --workdir=r/a'
_EVALUATE = ('python -m tepo_jax.evaluate --config=c.py:a --checkpoint=r/a '
             '--out=r/e')
_UNTRAINED = 'python -m tepo_jax.evaluate --config=c.py:b --out=r/b'
_REPORT = 'python -m tepo_jax.report --table=3 --runs=r'


def test_sweep_runs_the_report_s_commands(launch, sweep):
  done = sweep('table3', "--config.eval.sets=('a', 'b')")
  assert done.returncode == 0, done.stderr
  sets = " --config.eval.sets=('a', 'b')"
  assert launch.log() == [
      _TRAIN + sets, _EVALUATE + sets, _UNTRAINED + sets, _REPORT]


def test_sweep_dry_run(launch, sweep):
  done = sweep('--dry-run', 'table3', "--config.eval.sets=('a', 'b')")
  assert done.returncode == 0 and not launch.log()
  lines = [shlex.split(line) for line in done.stdout.splitlines()]
  assert [line[:3] + line[-1:] for line in lines] == [
      ['.venv/bin/python', '-m', f'tepo_jax.{program}',
       "--config.eval.sets=('a', 'b')"]
      for program in ('train', 'evaluate', 'evaluate')]


def test_sweep_starts_gpu_sh_where_that_is_installed(launch, sweep):
  (launch.root / '.venv' / '.installed-gpu').touch()
  done = sweep('--dry-run', 'table3')
  assert [line.split()[:2] for line in done.stdout.splitlines()] == [
      ['launch/gpu.sh', program]
      for program in ('train', 'evaluate', 'evaluate')]
  done = sweep('table3', HOSTS='a b')
  assert done.returncode == 2 and 'HOSTS' in done.stderr and not launch.log()


def test_sweep_continues_after_a_failure(launch, sweep):
  (launch.stubs / 'fails').touch()
  done = sweep('table3')
  assert done.returncode == 1
  assert 'failed: .venv/bin/python -m tepo_jax.train' in done.stderr
  assert launch.log() == [_TRAIN, _UNTRAINED, _REPORT]


@pytest.mark.parametrize('arguments', [
    (), ('huge',), ('table5',), ('--dry-run',), ('--dry-run', 'tiny'), ('--slice', 'map'),
    ('table3', 'table4'), ('table3', '-x')])
def test_sweep_refuses(launch, sweep, arguments):
  done = sweep(*arguments)
  assert done.returncode == 2 and not launch.log()
  assert done.stderr.count('\n') == 1


def test_sweep_of_an_own_config_covers_the_grid(launch, sweep):
  (launch.root / 'own.py').touch()
  done = sweep(
      'own', 'own.py', '--grid=optimizer.learning_rate=1e-6,3e-6',
      '--grid=rollout.samples=4', '--config.steps=5', OUT='o', SEEDS='7',
      METHODS='tepo grpo')
  assert done.returncode == 0, done.stderr
  assert launch.log() == [
      f'python -m tepo_jax.train --config=own.py:{method} --config.seed=7 '
      f'--workdir=o/runs/{method}_optimizer.learning_rate={rate}'
      f'_rollout.samples=4_seed7 --config.optimizer.learning_rate={rate} '
      '--config.rollout.samples=4 --config.steps=5'
      for rate in ('1e-6', '3e-6') for method in ('tepo', 'grpo')] + [
          'python -m tepo_jax.report --runs=o/runs --out=o/report']
  for wrong in (('own',), ('own', 'none.py'), ('own', 'own.py', '--grid=x')):
    done = sweep(*wrong)
    assert done.returncode == 2 and done.stderr.count('\n') == 1
