"""Bad input ends in one line that names it, status 2, nothing changed."""

import json
import os
import shutil
import socket

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from tepo_jax.runtime import lock as lock_lib

pytestmark = pytest.mark.long

TINY = '--config=configs/tiny.py:tepo'
SMALL = (
    '--config.steps=1', '--config.data.limit=64', '--config.rollout.prompts=4',
    '--config.rollout.samples=4', '--config.rollout.max_tokens=8',
    '--config.rollout.dynamic_sampling=off', '--config.eval.period=0',
    '--config.rollout.overlong_buffer=7',
    '--config.train.minibatch_prompts=2')
UNTRAINED = (
    '--config.pretrain.worked_steps=1', '--config.pretrain.mixed_steps=0',
    '--config.pretrain.demonstrations=64', '--config.pretrain.num_layers=1',
    '--config.pretrain.d_model=16', '--config.pretrain.head_dim=8',
    '--config.pretrain.d_ff=16')


@pytest.fixture(scope='module')
def model(programs, tmp_path_factory):
  out = tmp_path_factory.mktemp('model') / 'base'
  done = programs.run('pretrain', TINY, f'--out={out}', *UNTRAINED)
  assert done.returncode == 0, done.stderr
  assert 'making the base model: 0/' in done.stderr
  return out


@pytest.fixture(scope='module')
def finished(programs, model, tmp_path_factory):
  """The workdir of a run of one step."""
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  done = programs.run('train', TINY, *SMALL, f'--config.model={model}',
                      f'--workdir={workdir}')
  assert done.returncode == 0, done.stderr
  return workdir


def contents(folder):
  return {path: path.read_bytes()
          if path.is_file() and os.access(path, os.R_OK) else None
          for path in sorted(folder.rglob('*'))}


def refused(programs, named, tmp_path, program, *arguments):
  """Runs a program and checks that it refuses the input in one line."""
  before = contents(tmp_path)
  done = programs.run(program, *arguments)
  lines = [line for line in done.stderr.splitlines()
           if ': skipped ' not in line and not line.endswith(' 1 problem')]
  assert done.returncode == 2, done.stderr
  assert len(lines) == 1, done.stderr
  assert lines[0].startswith(f'tepo_jax.{program}: error: ')
  assert named in lines[0]
  assert contents(tmp_path) == before


# Overrides of a training run's config, and text that the line must contain.
CONFIG = [
    ('optimiser.learning_rate=1', 'config.optimizer.learning_rate'),
    ('lerning_rate=1', 'config.lerning_rate'),
    ('optimizer=1', 'learning_rate'),
    ('rollout.top_p=0.9', 'config.rollout.top_p'),
    ('method_name=grpo', 'method_name'),
    ('pretrain.batch=2', 'pretrain.batch'),
    ('pretrain.vocabulary=99', 'pretrain.vocabulary'),
    ('eval.samples=2', 'eval.period'),
    ('steps=many', 'steps'),
    ('steps=1.5', 'steps'),
    ('steps=0', 'steps'),
    ('steps=-3', 'steps'),
    ('seed=-1', 'seed'),
    ('seed=99999999999999999999', 'less than 2^32'),
    ('rollout.samples=100000000', 'GB of memory'),
    ('rollout.prompts=100000000000', 'GB of memory'),
    ('lora.rank=1000000000', 'GB'),
    ('grading.workers=1000000', 'GB of memory'),
    ('grading.timeout=100000000000000000', 'from 2 to 3600'),
    ('data.name=', 'data.name'),
    ('data.skip_bad=-1', 'data.skip_bad'),
    ('compute.remat=maybe', 'compute.remat'),
    ('compute.dtype=float8', 'float32'),
    ('method.weight=both', 'sequence'),
    ('method.clip.name=none_such', 'method'),
    ('method.clip.low=1.5', 'low'),
    ('method.clip.low=-0.1', 'low'),
    ('method.clip.high=-1', 'high'),
    ('method.reg.coef=nan', 'coef'),
    ('method.reg.penalty=k9', 'k1'),
    ('method.estimator=ppo', 'grpo'),
    ('mesh.data=3', 'mesh'),
    ('mesh.data=0', 'mesh'),
    ('mesh.tensor=4096', 'mesh'),
    ('rollout.samples=1', 'rollout.samples'),
    ('rollout.prompts=5', 'minibatch_prompts'),
    ('rollout.max_tokens=0', 'rollout.max_tokens'),
    ('rollout.max_tokens=100000', 'rollout.max_tokens'),
    ('rollout.temperature=0', 'rollout.temperature'),
    ('rollout.temperature=inf', 'rollout.temperature'),
    ('rollout.overlong_buffer=1000', 'overlong_buffer'),
    ('rollout.dynamic_sampling=refil', 'refill'),
    ('rollout.logp_gap_limit=-1', 'logp_gap_limit'),
    ('train.epochs=0', 'train.epochs'),
    ('train.minibatch_prompts=3', 'minibatch_prompts'),
    ('optimizer.learning_rate=nan', 'learning_rate'),
    ('optimizer.learning_rate=-1', 'learning_rate'),
    ('optimizer.beta2=1', 'beta2'),
    ('grading.workers=0', 'grading.workers'),
    ('grading.timeout=1', 'grading.timeout'),
    ('checkpoint.keep=0', 'checkpoint.keep'),
    ('checkpoint.period=0', 'checkpoint.period'),
    ('data.limit=0', 'data.limit'),
    ('data.max_prompt_tokens=4', 'max_prompt_tokens'),
    ('data.name=dapo_moth', 'dapo_moth'),
    ('data.name=/nowhere.jsonl', '/nowhere.jsonl'),
    ('data.template=plane', 'plane'),
    ('data.template=/nowhere.jinja', '/nowhere.jinja'),
    ('data.template_args=thinking=False', 'has no argument thinking'),
    ('data.date=today', 'not YYYY-MM-DD'),
    ('data.columns.problem=question', 'data.columns.problem'),
    ('data.columns.solution=answer', 'data.columns.solution'),
    ('model=/nowhere', '/nowhere'),
    ('train.packing=tight', 'segments'),
    ('train.chunk_size=0', 'train.chunk_size'),
    ('train.behaviour.weight=both', 'sequence'),
    ('train.behaviour.cap=3', 'train.behaviour.weight'),
    ('compute.attention=flash', 'compute.attention'),
    ('dump.format=xml', 'jsonl'),
    ('rollout.slots=0', 'rollout.slots'),
    ('rollout.chunk=0', 'rollout.chunk'),
    ('rollout.max_generation_batches=3', 'dynamic_sampling'),
    ('checkpoint.keep_every=-1', 'checkpoint.keep_every'),
    ('eval.top_p=1.1', 'eval.top_p'),
    ('eval.temperature=-1', 'eval.temperature'),
    ('lora.rank=-1', 'lora.rank'),
    ('lora.alpha=2', 'lora.rank'),
    ("lora.targets=('head',)", 'lora.targets'),
    ('profile.steps=(0,)', 'profile.steps'),
]


@pytest.mark.parametrize('override, named', CONFIG)
def test_config(programs, model, tmp_path, override, named):
  field = override.partition('=')[0]
  arguments = [a for a in (*SMALL, f'--config.model={model}')
               if a.split('=')[0] != f'--config.{field}']
  refused(programs, named, tmp_path, 'train', TINY, *arguments,
          f'--config.{override}', f'--workdir={tmp_path / "run"}')


CONFIG_FILES = {
    'no ConfigDict': ('def get_config():\n  return 3\n', 'ConfigDict'),
    'no function': ('x = 1\n', 'get_config'),
    'raises': ('def get_config():\n  return 1 / 0\n', 'line 2'),
    'syntax': ('def get_config(:\n', 'line 1'),
    'not text': (b'\xff\xfe\x00', 'mine.py'),
}


@pytest.mark.parametrize('case', CONFIG_FILES)
def test_config_file(programs, tmp_path, case):
  text, named = CONFIG_FILES[case]
  path = tmp_path / 'mine.py'
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  refused(programs, named, tmp_path, 'train', f'--config={path}',
          f'--workdir={tmp_path / "run"}')


# Whole command lines; {tmp}, {model} and {run} are folders.
COMMANDS = {
    'no config': ('train', ['--workdir={tmp}/run'], '--config'),
    'config missing': ('train', ['--config=configs/tinny.py',
                                 '--workdir={tmp}/run'], 'configs/tiny.py'),
    'method': ('train', ['--config=configs/tiny.py:tepoo',
                         '--workdir={tmp}/run'], 'did you mean tepo?'),
    'no workdir': ('train', [TINY], '--workdir'),
    'flag': ('train', [TINY, '--workdirr={tmp}/run'], '--workdir'),
    'argument': ('train', [TINY, '--workdir={tmp}/run', 'now'], 'now'),
    'workdir is a file': ('train', [TINY, '--workdir={model}/config.json',
                                    '--config.model={model}'],
                          'config.json'),
    'workdir is no run': ('train', [TINY, '--workdir={model}',
                                    '--config.model={model}'],
                          'belongs to another config'),
    'workdir cannot be': ('train', [TINY, '--workdir=/dev/null/run',
                                    '--config.model={model}'], '/dev/null'),
    'another config': ('train', ['--config=configs/tiny.py:grpo',
                                 '--workdir={run}', '--config.model={model}'],
                       'another config'),
    'train without a decoding': (
        'train', ['--config=configs/base.py', '--workdir={tmp}/run',
                  '--config.model={model}', '--config.eval.sets=("a.csv",)'],
        'a.csv has no default decoding'),
    'evaluate without a decoding': (
        'evaluate', ['--config=configs/base.py', '--checkpoint={model}',
                     '--out={tmp}/out', '--config.eval.sets=("a.csv",)'],
        'a.csv has no default decoding'),
    'evaluate nothing': ('evaluate', [TINY, '--checkpoint=/nowhere',
                                      '--out={tmp}/out'], '/nowhere'),
    'evaluate a file': ('evaluate', [TINY, '--out={tmp}/out',
                                     '--checkpoint={model}/config.json'],
                        'config.json'),
    'evaluate a step of no run': (
        'evaluate', [TINY, '--checkpoint={model}', '--step=1',
                     '--out={tmp}/out'], '--step=1'),
    'evaluate a step': ('evaluate', [TINY, '--checkpoint={run}', '--step=7',
                                     '--out={tmp}/out'], 'of step 7'),
    'export no run': ('export', ['--workdir={model}', '--out={tmp}/out'],
                      'config.json'),
    'export nothing': ('export', ['--workdir=/nowhere', '--out={tmp}/out'],
                       '/nowhere'),
    'export step': ('export', ['--workdir={run}', '--step=7',
                               '--out={tmp}/out'], 'of step 7'),
    'export adapter': ('export', ['--workdir={run}', '--out={tmp}/out',
                                  '--adapter', '--dtype=bfloat16'],
                       'adapters are exported in float32'),
    'export onto': ('export', ['--workdir={run}', '--out={model}'],
                    'not empty'),
    'evaluate onto': ('evaluate', [TINY, '--checkpoint={run}',
                                   '--out={model}'], 'not empty'),
    'report nothing': ('report', [], '--runs'),
    'report nowhere': ('report', ['--runs=/nowhere', '--out={tmp}/out'],
                       '/nowhere'),
    'report no run': ('report', ['--runs={model}', '--out={tmp}/out'],
                      'base'),
    'report table': ('report', ['--table=9', '--runs={run}'], '9'),
    'compare': ('report', ['--compare={model},{run}'], 'results.json'),
    'compare one': ('report', ['--compare={run}'], '--compare'),
    'plan': ('plan', [TINY, '--topology=v9:2x2'], 'v9'),
    'benchmark': ('benchmark', ['--config=configs/benchmark.py:tiny',
                                '--parts=none'], 'none'),
    'benchmark peer': ('benchmark', ['--config=configs/benchmark.py:tiny',
                                     '--peer=none'], 'transformers, trl'),
    'mechanism without a model': (
        'mechanism', [TINY, '--out={tmp}/out'], 'config.model must be a'),
    'rollout of mechanism': (
        'mechanism', [TINY, '--out={tmp}/out', '--config.rollout.prompts=8'],
        'config.rollout.prompts: the measurement determines it'),
    'mechanism onto': ('mechanism', [TINY, '--config.model={model}',
                                     '--out={model}'], 'not empty'),
    'pretrain onto': ('pretrain', [TINY, '--out={model}'], 'not empty'),
    'pretrain none': ('pretrain', ['--config=configs/base.py',
                                   '--out={tmp}/out'], 'pretrain'),
}


@pytest.mark.parametrize('case', COMMANDS)
def test_command(programs, model, finished, tmp_path, case):
  program, arguments, named = COMMANDS[case]
  before = contents(model), contents(finished)
  refused(programs, named, tmp_path, program, *(
      a.format(tmp=tmp_path, model=model, run=finished) for a in arguments))
  assert (contents(model), contents(finished)) == before


def edit(name, **fields):
  def change(folder):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
  return change


def write(name, data):
  return lambda folder: (folder / name).write_bytes(data)


def remove(name):
  return lambda folder: (folder / name).unlink()


def cut(name, size):
  def change(folder):
    (folder / name).write_bytes((folder / name).read_bytes()[:size])
  return change


def tensors(change):
  def rewrite(folder):
    path = folder / 'model.safetensors'
    arrays = safetensors_numpy.load_file(path)
    change(arrays)
    safetensors_numpy.save_file(arrays, path)
  return rewrite


NORM = 'model.norm.weight'
MODELS = {
    'no config.json': (remove('config.json'), 'config.json'),
    'config.json cut': (cut('config.json', 30), 'config.json'),
    'config.json is a list': (write('config.json', b'[]'), 'config.json'),
    'architecture': (edit('config.json', architectures=['GPT2LMHeadModel'],
                          model_type='gpt2'), 'GPT2LMHeadModel'),
    'activation': (edit('config.json', hidden_act='gelu'), 'gelu'),
    'heads': (edit('config.json', num_attention_heads=3), 'config.json'),
    'size is text': (edit('config.json', hidden_size='16'), 'hidden_size'),
    'size is negative': (edit('config.json', hidden_size=-16), 'hidden_size'),
    'rope scaling': (edit('config.json', rope_scaling={'rope_type': 'odd'},
                          rope_parameters={'rope_type': 'odd',
                                           'rope_theta': 1e4}), 'odd'),
    'no weights': (remove('model.safetensors'), 'safetensors'),
    'weights cut': (cut('model.safetensors', 2000), 'model.safetensors'),
    'weights empty': (write('model.safetensors', b''), 'model.safetensors'),
    'header too long': (write('model.safetensors', b'\xff' * 100),
                        'model.safetensors'),
    'header no JSON': (write('model.safetensors', (9).to_bytes(8, 'little')
                             + b'{"a": [[[' + b'0' * 40),
                       'model.safetensors'),
    'tensor missing': (tensors(lambda a: a.pop(NORM)), NORM),
    'tensor extra': (tensors(lambda a: a.update(more=np.zeros(2, 'f4'))),
                     'more'),
    'tensor shape': (tensors(lambda a: a.update({NORM: np.zeros(5, 'f4')})),
                     NORM),
    'tensor type': (tensors(lambda a: a.update({NORM: np.zeros(16, 'i4')})),
                    NORM),
    'no tokenizer': (remove('tokenizer.json'), 'tokenizer'),
    'tokenizer cut': (cut('tokenizer.json', 100), 'tokenizer'),
}


@pytest.mark.parametrize('case', MODELS)
def test_model_folder(programs, model, tmp_path, case):
  change, named = MODELS[case]
  folder = tmp_path / 'model'
  shutil.copytree(model, folder)
  change(folder)
  refused(programs, named, tmp_path, 'train', TINY, *SMALL,
          f'--config.model={folder}', f'--workdir={tmp_path / "run"}')


GOOD = {'id': 'a', 'problem': '1 + 1', 'answers': ['2']}


def rows(*lines):
  return b''.join(line if isinstance(line, bytes) else
                  json.dumps(line).encode() + b'\n' for line in lines)


DATA = {
    'empty': (b'', 'rows.jsonl'),
    'blank': (b'\n\n', 'rows.jsonl'),
    'no JSON': (rows(GOOD, b'{"problem": \n'), 'rows.jsonl'),
    'a list': (rows(b'[1, 2]\n'), 'rows.jsonl'),
    'no problem': (rows(GOOD, {'id': 'b', 'answers': ['2']}), 'row 2'),
    'no answer': (rows(GOOD, {'id': 'b', 'problem': '?'}), 'row 2'),
    'empty answer': (rows(GOOD, GOOD | {'id': 'b', 'answers': ['']}),
                     'row 2'),
    'no answers': (rows(GOOD, GOOD | {'id': 'b', 'answers': []}), 'row 2'),
    'answers a mapping': (rows(GOOD | {'answers': {}}), 'row 1'),
    'problem a number': (rows(GOOD | {'problem': 5}), 'row 1'),
    'problem empty': (rows(GOOD | {'problem': ' '}), 'row 1'),
    'encoding': (b'{"id": "a", "problem": "\xe9", "answers": ["2"]}\n',
                 'rows.jsonl'),
    'binary': (bytes(range(256)) * 4, 'rows.jsonl'),
    'huge line': (b'x' * (8 << 20), 'rows.jsonl'),
    'huge problem': (rows(GOOD | {'problem': '1 + ' * (1 << 16)}),
                     'max_prompt_tokens'),
    'deep': (b'[' * 100_000, 'rows.jsonl'),
    'lone surrogate': (rb'{"problem": "\ud800", "answers": ["2"]}', 'row 1'),
    'surrogate in the answer': (rb'{"problem": "1", "answers": ["\ud800"]}',
                                'row 1'),
    'long answer': (rows(GOOD, GOOD | {'answers': ['7' * 5000]}), 'row 2'),
    'long integer': (b'{"problem": "1", "answer": %s}' % (b'7' * 4000),
                     'row 1'),
    'longer integer': (b'{"problem": "1", "answer": %s}' % (b'7' * 5000),
                       'row 1'),
    'huge tolerance': (b'{"problem": "1", "answer": 2, "abs_error": %s}' % (
        b'7' * 4000), 'row 1'),
}


@pytest.mark.parametrize('case', DATA)
def test_data_file(programs, model, tmp_path, case):
  data, named = DATA[case]
  path = tmp_path / 'rows.jsonl'
  path.write_bytes(data)
  refused(programs, named, tmp_path, 'train', TINY, *SMALL,
          f'--config.model={model}', f'--config.data.name={path}',
          f'--workdir={tmp_path / "run"}')


CHECKPOINTS = {
    'gone': (lambda run: shutil.rmtree(run / 'checkpoints'), 'checkpoints'),
    'none': (lambda run: shutil.rmtree(run / 'checkpoints' / '1'),
             'no checkpoint'),
    'damaged': (lambda run: shutil.rmtree(
        run / 'checkpoints' / '1' / 'state'), 'checkpoints/1'),
    'config gone': (remove('config.json'), 'config.json'),
    'config cut': (cut('config.json', 50), 'config.json'),
    'config lacks fields': (write('config.json', b'{"seed": 0}'),
                            'config.json'),
    'a field is text': (edit('config.json', seed='0'), "seed is '0'"),
    'a field is a list': (edit('config.json', steps=[1]), 'steps is (1,)'),
    'a section is a number': (edit('config.json', rollout=3),
                              'rollout.prompts is missing'),
    'a field is a section': (edit('config.json', seed={'a': 1}),
                             'config.json: seed is'),
    'the method is a number': (edit('config.json', method=3), 'method'),
    'the method has a new number': (
        edit('config.json', method=dict(tau_positive=1.0)), 'method'),
    'a value is out of range': (edit('config.json', steps=-1), 'steps=-1'),
    'a name has a dot': (edit('config.json', **{'a.b': 1}), 'config.json'),
}


@pytest.mark.parametrize('case', CHECKPOINTS)
def test_workdir(programs, finished, tmp_path, case):
  change, named = CHECKPOINTS[case]
  workdir = tmp_path / 'run'
  shutil.copytree(finished, workdir)
  change(workdir)
  refused(programs, named, tmp_path, 'export', f'--workdir={workdir}',
          f'--out={tmp_path / "out"}')


@pytest.mark.parametrize('program', ['train', 'evaluate'])
def test_a_folder_in_use(programs, model, finished, tmp_path, program):
  """The lock of a live process: this one."""
  shutil.copytree(finished, tmp_path / 'run')
  folder = tmp_path / ('run' if program == 'train' else 'out')
  with lock_lib.FolderLock(folder) as lock:
    lock.acquire()
    out = (f'--workdir={folder}',) if program == 'train' else (
        f'--checkpoint={model}', f'--out={folder}')
    arguments = SMALL if program == 'train' else (
        '--config.eval.limit=4', '--config.eval.samples=1')
    refused(programs, f'{folder} is in use by process {os.getpid()} on host '
            f'{socket.gethostname()}', tmp_path, program, TINY, *arguments,
            f'--config.model={model}', *out)


@pytest.mark.parametrize('program', ['train', 'export'])
def test_a_model_folder_that_has_changed(
    programs, model, finished, tmp_path, program):
  before, config = contents(finished), (model / 'config.json').read_bytes()
  arguments = [f'--workdir={finished}', f'--out={tmp_path / "out"}']
  if program == 'train':
    arguments = [TINY, *SMALL, f'--config.model={model}', arguments[0]]
  try:
    edit('config.json', rope_theta=5e3)(model)
    refused(programs, f'{model}/config.json has changed', tmp_path, program,
            *arguments)
  finally:
    (model / 'config.json').write_bytes(config)
  assert contents(finished) == before


def test_weights_that_are_not_finite(programs, model, tmp_path):
  """They are read after the workdir has been claimed."""
  folder = tmp_path / 'model'
  shutil.copytree(model, folder)
  tensors(lambda a: a[NORM].__setitem__(0, np.nan))(folder)
  for program, *arguments in (
      ('train', *SMALL, f'--config.model={folder}',
       f'--workdir={tmp_path / "run"}'),
      ('evaluate', '--config.eval.limit=4', f'--checkpoint={folder}',
       f'--out={tmp_path / "out"}')):
    done = programs.run(program, TINY, *arguments)
    *_, line = done.stderr.splitlines()
    assert done.returncode == 2 and 'Traceback' not in done.stderr
    assert line == (f'tepo_jax.{program}: error: {folder}: tensor {NORM} has '
                    'weights that are not finite')


def test_logits_that_overflow(programs, model, tmp_path):
  """The weights are finite: the step and the problem are named."""
  folder = tmp_path / 'model'
  shutil.copytree(model, folder)
  tensors(lambda a: a.update({NORM: np.full_like(a[NORM], 3e38)}))(folder)
  done = programs.run('train', TINY, *SMALL, f'--config.model={folder}',
                      f'--workdir={tmp_path / "run"}')
  *_, line = done.stderr.splitlines()
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  assert line.startswith('tepo_jax.train: error: step 1, problem arithmetic')
  assert 'logits are not finite' in line
  done = programs.run(
      'evaluate', TINY, '--config.eval.limit=4', '--config.eval.samples=1',
      f'--checkpoint={folder}', f'--out={tmp_path / "out"}')
  *_, line = done.stderr.splitlines()
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  assert line.startswith('tepo_jax.evaluate: error: arithmetic, arithmetic')


def test_a_tokenizer_without_a_chat_template_is_reported_once(
    programs, model, tmp_path):
  folder = tmp_path / 'model'
  shutil.copytree(model, folder)
  for name in ('chat_template.jinja', 'chat_template.json'):
    (folder / name).unlink(missing_ok=True)
  edit('tokenizer_config.json', chat_template=None)(folder)
  done = programs.run(
      'train', TINY, *SMALL, f'--config.model={folder}',
      '--config.data.name=/nowhere.jsonl', f'--workdir={tmp_path / "run"}')
  said, refusal = done.stderr.splitlines()
  assert said.startswith(
      f'warning: {folder}: the tokenizer has no chat template')
  assert 'data.template=plain' in said and '/nowhere.jsonl' in refusal


# Files of an evaluation, and text that the line must contain.
RESULTS = {
    'no results': ({'samples.jsonl': b''}, 'results.json'),
    'cut': ({'results.json': b'{"sets": ', 'samples.jsonl': b''},
            'results.json'),
    'a list': ({'results.json': b'[]', 'samples.jsonl': b''}, 'results'),
    'no samples': ({'results.json': b'{"sets": {}}'}, 'samples.jsonl'),
    'samples cut': ({'results.json': b'{"sets": {}}',
                     'samples.jsonl': b'{"set": "a'}, 'samples.jsonl'),
}


@pytest.mark.parametrize('case', RESULTS)
def test_results(programs, tmp_path, case):
  written, named = RESULTS[case]
  for name, data in written.items():
    (tmp_path / name).write_bytes(data)
  refused(programs, named, tmp_path, 'report',
          f'--compare={tmp_path},{tmp_path}')


# Without permission: files of {tmp}/model, {tmp}/rows.jsonl, {tmp}/closed.
CLOSED = {
    'model folder': ('model', 'model'),
    'model config': ('model/config.json', 'config.json'),
    'weights': ('model/model.safetensors', 'model.safetensors'),
    'tokenizer': ('model/tokenizer.json', 'tokenizer'),
    'data file': ('rows.jsonl', 'rows.jsonl'),
    'workdir': ('closed', 'closed'),
}


@pytest.mark.parametrize('case', CLOSED)
def test_permissions(programs, model, tmp_path, case):
  closed, named = CLOSED[case]
  shutil.copytree(model, tmp_path / 'model')
  (tmp_path / 'rows.jsonl').write_bytes(rows(GOOD))
  (tmp_path / 'closed').mkdir()
  (tmp_path / closed).chmod(0)
  refused(programs, named, tmp_path, 'train', TINY, *SMALL,
          f'--config.model={tmp_path / "model"}',
          f'--config.data.name={tmp_path / "rows.jsonl"}',
          f'--workdir={tmp_path / "closed" / "run"}')
