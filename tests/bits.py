r"""Digests of what short runs write: refactoring must not change a bit.

  python -m tests.bits --out=FILE                 # on the commit before
  python -m tests.bits --against=FILE             # on the commit after

Trains `configs/tiny.py` for five rollout steps with the rows below and with
LoRA, from one base model, and computes digests of each run's metrics (without
times and host usage), rollouts, and checkpointed arrays (parameters and
moments). One epoch, so that every version makes the same minibatches. Digests
hold for one kind of CPU and one version of jax, which the file names:
`--against` refuses a file made elsewhere.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import platform
import sys
import tempfile

import jax

from tests import runs

RUNS = {
    'tepo': (), 'grpo': (), 'clip_cov': (), 'kl_cov': (),
    'lora': ('--config.lora.rank=4', '--config.optimizer.learning_rate=1e-3')}
_STEPS = ('--config.steps=5', '--config.train.epochs=1',
          '--config.eval.limit=32',
          '--config.eval.period=5', '--config.checkpoint.period=5')


def machine() -> dict[str, str]:
  """The CPU and jax version, on which the bits depend."""
  cpu = pathlib.Path('/proc/cpuinfo')
  lines = cpu.read_text().splitlines() if cpu.exists() else []
  model = next((line.split(':')[1].strip() for line in lines
                if line.startswith('model name')), platform.processor())
  return {'cpu': model, 'jax': jax.__version__}


def digests(workdir: pathlib.Path) -> dict[str, str]:
  """name -> SHA-256 of a run's metrics, of its rollouts, of its checkpoint."""
  def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]

  records = [runs.untimed(record) for record in runs.records(workdir)]
  arrays = json.loads(
      (workdir / 'checkpoints/5/extra/metadata').read_text())
  names = sorted(set().union(*records))
  return {
      f'metrics/{name}': digest(json.dumps([
          record[name] if name in record else None for record in records]))
      for name in names} | {
      'rollouts': digest(''.join(
          path.read_text() for path in sorted(workdir.glob('rollouts/*')))),
      'checkpoint': digest(json.dumps(arrays['digests'], sort_keys=True))}


def all_digests(folder: pathlib.Path) -> dict[str, dict[str, str]]:
  """Makes the base model, then the runs, two at a time."""
  model = folder / 'model'
  runs.run('pretrain', '--config=configs/tiny.py', f'--out={model}',
           '--config.pretrain.worked_steps=300',
           '--config.pretrain.mixed_steps=100')

  def run(name):
    row = name if name != 'lora' else 'tepo'
    runs.run('train', f'--config=configs/tiny.py:{row}',
             f'--workdir={folder / name}', f'--config.model={model}',
             *_STEPS, *RUNS[name])
    return name, digests(folder / name)

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    return dict(pool.map(run, RUNS))


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument('--out', type=pathlib.Path)
  parser.add_argument('--against', type=pathlib.Path)
  settings = parser.parse_args()
  os.environ['JAX_PLATFORMS'] = 'cpu'
  expected = None
  if settings.against:
    expected = json.loads(settings.against.read_text())
    if expected['machine'] != machine():
      sys.exit(f'{settings.against} was made on {expected["machine"]}; this is '
               f'{machine()}')
  with tempfile.TemporaryDirectory() as scratch:
    found = all_digests(pathlib.Path(scratch))
  if settings.out:
    settings.out.write_text(json.dumps(
        {'machine': machine(), 'runs': found}, indent=1) + '\n')
  if expected is None:
    print(json.dumps(found, indent=1))
    return
  differing = []
  for run in RUNS:
    before, now = expected['runs'][run], found[run]
    for name in sorted(before.keys() ^ now.keys()):
      print(f'{run}/{name} is {"gone" if name in before else "new"}')
    differing += [f'{run}/{name}' for name in sorted(before.keys() & now.keys())
                  if before[name] != now[name]]
  print('\n'.join(f'{name} differs' for name in differing) or 'equal')
  sys.exit(bool(differing))


if __name__ == '__main__':
  main()
