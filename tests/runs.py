"""Small runs of the programs, and their records."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]

# XLA's older emitters compile fusions in a third of the time: for all tests in
# this process, and for programs that are not of the fixture `optimized`.
QUICK_FUSIONS = '--xla_cpu_use_fusion_emitters=false'

# The tiny config at a size that compiles in seconds. An untrained model is
# never correct: the overlong penalty makes the rewards of its groups differ.
SMALL = (
    '--config.steps=8', '--config.data.limit=64', '--config.rollout.prompts=4',
    '--config.rollout.samples=4', '--config.rollout.max_tokens=16',
    '--config.rollout.dynamic_sampling=off',
    '--config.rollout.overlong_buffer=15',
    '--config.train.minibatch_prompts=2', '--config.eval.limit=8',
    '--config.eval.samples=2', '--config.eval.max_tokens=16',
    '--config.eval.period=4', '--config.checkpoint.period=1')
UNTRAINED = (
    '--config.pretrain.worked_steps=3', '--config.pretrain.mixed_steps=2',
    '--config.pretrain.demonstrations=64', '--config.pretrain.num_layers=2',
    '--config.pretrain.d_model=32', '--config.pretrain.head_dim=16',
    '--config.pretrain.d_ff=48', '--config.pretrain.num_kv_heads=1')


def command(program, *arguments):
  return [sys.executable, '-m', f'tepo_jax.{program}', *map(str, arguments)]


def environment():
  """That of a laptop, which has one device."""
  optimized = os.environ.get('JAX_DISABLE_MOST_OPTIMIZATIONS') == '0'
  return os.environ | {'XLA_FLAGS': '' if optimized else QUICK_FUSIONS}


def run(program, *arguments, status=0):
  done = subprocess.run(command(program, *arguments), cwd=ROOT, text=True,
                        capture_output=True, env=environment())
  assert done.returncode == status, done.stderr[-3000:]
  return done


def make_model(out):
  """Makes an untrained model that is trained in seconds."""
  run('pretrain', '--config=configs/tiny.py', f'--out={out}', *UNTRAINED)


def train_arguments(model, workdir, method='tepo'):
  return (f'--config=configs/tiny.py:{method}', f'--workdir={workdir}',
          f'--config.model={model}', *SMALL)


def records(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def untimed(record):
  return {name: value for name, value in record.items()
          if not name.startswith(('seconds/', 'host/'))
          and name not in ('tokens_per_second', 'compilations')}
