"""launch/*.sh: with stand-ins for python, apt-get, nvidia-smi and gcloud."""

import os
import pathlib
import shlex
import shutil
import stat
import subprocess

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
  *) echo "python $*" >>"$STUBS/log"; [[ ! -e "$STUBS/pip_fails" ]] ;;
esac
'''
_APT = '#!/bin/bash\necho "apt-get $*" >>"$STUBS/log"\ntouch "$STUBS/$APT_DOES"'
_DRIVER = '#!/bin/bash\n[[ -n $DRIVER ]] && echo "$DRIVER"'


@pytest.fixture(name='launch')
def _launch(tmp_path):
  """Runs a script of a copy of the repository, in a folder elsewhere."""
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
  assert launch.log() == [
      'apt-get update -qq', 'apt-get install -y -qq python3.11-venv',
      'python -m pip install --quiet --disable-pip-version-check --constraint'
      ' launch/constraints.txt -r requirements.txt']


def test_setup_does_only_what_changed(launch):
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


def test_setup_without_venv_says_what_to_do(launch):
  for apt in (_APT, '#!/bin/bash\nexit 1'):
    (launch.stubs / 'apt-get').write_text(apt)
    done = launch('setup.sh', 'cpu', APT_DOES='nothing_useful')
    assert done.returncode == 2
    assert 'sudo apt-get install python3.11-venv' in done.stderr


def test_a_failed_install_is_tried_again(launch):
  (launch.stubs / 'venv_is_there').touch()
  (launch.stubs / 'pip_fails').touch()
  done = launch('setup.sh', 'cpu')
  assert done.returncode == 2 and 'pip could not install' in done.stderr
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
  assert launch.log()[-1].endswith(f'-r requirements.txt jax[{extra}]==0.10.2')


@pytest.mark.parametrize('arguments', [[], ['xpu'], ['cpu', 'test'],
                                       ['cpu', 'tests', 'more'], ['gpu']])
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
      f'--workdir=a study/runs/{method}_{seed} --config.steps=3 '
      '--config.x=a b' for method in ('tepo', 'grpo') for seed in (4, 5))


@pytest.mark.parametrize('arguments', [(), ('huge',)])
def test_sweep_refuses(launch, arguments):
  done = launch('sweep.sh', *arguments)
  assert done.returncode == 2 and 'usage' in done.stderr


def test_test_passes_its_arguments_on(launch):
  (launch.stubs / 'venv_is_there').touch()
  assert launch('test.sh', '-k', 'mesh').returncode == 0
  assert launch.log()[-1] == 'python -m pytest tests -k mesh'


_SLICE = {'NAME': 'n', 'ZONE': 'z', 'PROJECT': 'p', 'TYPE': 'v6e-8'}


def test_tpu_vm_dry_run(launch):

  def commands(*arguments):
    done = launch('tpu_vm.sh', '--dry-run', *arguments, **_SLICE)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]

  vm = ['gcloud', 'compute', 'tpus', 'tpu-vm']
  where = ['--project=p', '--zone=z']
  assert commands('create') == [
      vm + ['create', 'n', '--accelerator-type=v6e-8',
            '--version=v2-alpha-tpuv6e'] + where]
  assert commands('delete') == [vm + ['delete', 'n', '--quiet'] + where]
  assert commands('logs')[0][:7] == vm + ['ssh', 'n', '--worker=0']
  tar, copy, setup = commands('setup')
  assert tar[0] == 'tar' and copy[4] == 'scp' and copy[6] == 'n:tepo.tgz'
  assert '--worker=all' in copy and '--worker=all' in setup
  assert 'tepo/launch/setup.sh tpu' in setup[7]
  run, = commands('run', "--config.eval.sets=('x', 'y')", '--workdir=$(id)')
  # The shell of the host gives the program exactly these arguments back.
  remote = run[7].removeprefix('--command=').split(' -m tepo_jax.train ')[1]
  assert shlex.split(remote.split('>train.log')[0]) == [
      "--config.eval.sets=('x', 'y')", '--workdir=$(id)']
  assert 'TEPO_MULTIHOST=1 nohup' in run[7]


def test_tpu_vm_calls_gcloud(launch):
  gcloud = launch.stubs / 'gcloud'
  gcloud.write_text('#!/bin/bash\necho "gcloud $*" >>"$STUBS/log"')
  gcloud.chmod(0o755)
  done = launch('tpu_vm.sh', 'delete', **_SLICE)
  assert done.returncode == 0 and not done.stdout
  assert launch.log() == [
      'gcloud compute tpus tpu-vm delete n --quiet --project=p --zone=z']


@pytest.mark.parametrize('arguments, without, said', [
    ((), '', 'usage'), (('fly',), '', 'usage'), (('create', 'x'), '', "'x'"),
    (('run',), '', 'arguments'), (('create',), 'ZONE', 'ZONE is not set'),
    (('create',), 'TYPE', 'TYPE is not set')])
def test_tpu_vm_refuses(launch, arguments, without, said):
  environment = {k: v for k, v in _SLICE.items() if k != without}
  done = launch('tpu_vm.sh', '--dry-run', *arguments, **environment)
  assert done.returncode == 2 and said in done.stderr
  assert not done.stdout and done.stderr.count('\n') == 1
