r"""Accuracy of a model or a checkpoint on the config's evaluation sets.

  python -m tepo_jax.evaluate --config=configs/tiny.py:tepo \
      --checkpoint=DIR --out=DIR

--checkpoint is a Hugging Face folder, or the workdir of a training run (its
last checkpoint then). Writes results.json and samples.jsonl into --out, and
prints avg@k and pass@k of each set.
"""

import json
import pathlib

from absl import flags
import jax

from tepo_jax import cli
from tepo_jax.job import checks
from tepo_jax.job import evaluation as evaluation_lib
from tepo_jax.job import session as session_lib
from tepo_jax.job import steps
from tepo_jax.runtime import mesh as mesh_lib

_CONFIG = cli.DEFINE_config()
_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'A Hugging Face folder or the workdir of a run.',
    required=True)
_OUT = flags.DEFINE_string(
    'out', None, 'Folder for results.json and samples.jsonl; must be new.',
    required=True)


def main() -> None:
  config, out = _CONFIG.value, cli.new_folder(_OUT.value)
  checks.check_values(config)
  folder, params = pathlib.Path(_CHECKPOINT.value), None
  if (folder / session_lib.CHECKPOINTS).is_dir():
    folder, params = session_lib.restore_params(
        folder, mesh_lib.make(config.mesh))
  with session_lib.open_folder(config, folder) as session:
    evaluations = evaluation_lib.prepare(session)
    session_lib.cache_compilations(config, out)
    cast = steps.make_decode_cast(session.model, session.mesh)
    params = cast(session.load_params() if params is None else params)
    results, lines = {}, []
    key = steps.stream(config.seed, 'eval')
    for index, evaluation in enumerate(evaluations):
      groups, results[evaluation.name] = evaluation.run(
          params, jax.random.fold_in(key, index))
      lines += evaluation_lib.sample_lines(evaluation.name, groups)
  out.mkdir(parents=True, exist_ok=True)
  (out / 'results.json').write_text(json.dumps(results, indent=2) + '\n')
  with (out / 'samples.jsonl').open('w') as file:
    file.writelines(json.dumps(line) + '\n' for line in lines)
  for name, result in results.items():
    print(name, ' '.join(f'{key} {value:.4g}' for key, value in result.items()))


if __name__ == '__main__':
  cli.run(main)
