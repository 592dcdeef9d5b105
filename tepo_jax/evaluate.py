r"""Evaluates a model or a checkpoint on the config's evaluation sets.

  python -m tepo_jax.evaluate --config=configs/tiny.py:tepo \
      --checkpoint=DIR [--step=N] --out=DIR

--checkpoint is a Hugging Face folder, or the workdir of a training run, whose
last checkpoint is used, or that of rollout step N; without it, config.model is
evaluated. Writes results.json and samples.jsonl to --out, and prints accuracies
with their intervals. If it is killed, or stopped by SIGTERM (status 42), the
same command resumes it; the results are the same. On several hosts
(TEPO_MULTIHOST=1) all take part, and the first writes.
"""

import collections
import functools
import json

from absl import flags
import jax
import ml_collections
import numpy as np

from configs import fields as fields_lib
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import configuration
from tepo_jax.job import evaluation as evaluation_lib
from tepo_jax.job import facts
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import restore
from tepo_jax.job import results as results_lib
from tepo_jax.job import run_folder
from tepo_jax.job import sample_file
from tepo_jax.job import sampling as sampling_lib
from tepo_jax.job import session as session_lib
from tepo_jax.job import sizes
from tepo_jax.job import texts
from tepo_jax.runtime import agreement
from tepo_jax.runtime import files
from tepo_jax.runtime import interrupts
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import processes

_CONFIG = cli.DEFINE_config()
_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'A Hugging Face folder or the workdir of a run; by '
    'default config.model.')
_STEP = flags.DEFINE_integer(
    'step', None, 'Rollout step of the checkpoint; by default the last.')
_OUT = flags.DEFINE_string(
    'out', None, 'Folder for results.json and samples.jsonl, new or of the '
    'same evaluation.', required=True)


def main() -> None:
  config = _CONFIG.value
  configuration.check_values(config)
  configuration.check_decodings(config.eval)
  sizes.check(config)
  config.lora.rank = 0  # adapters are merged on restore
  processes.initialize(config.compute.heartbeat)
  with processes.ending_together():
    agreement.check(functools.partial(facts.of_start, config))
    evaluate(config, files.path(_OUT.value))


def evaluate(config: ml_collections.ConfigDict, out: files.Path) -> None:
  """Evaluates; all processes of a job must call it.

  Raises:
    errors.Interrupted: SIGTERM stopped it; complete groups are saved.
  """
  stop = processes.StopRequest()
  interrupts.unwind_on_first()  # Ctrl-C ends it now: each group is saved
  folder, params, step = _checkpoint(config), None, None
  is_run = (folder / session_lib.CHECKPOINTS).exists()
  if is_run:
    step = restore.latest_step(folder) if _STEP.value is None else _STEP.value
    processes.on_first(_say_what_differs, config, folder)
  elif _STEP.value is not None:
    raise errors.InputError(
        f'--step={_STEP.value}: {folder} is not the workdir of a run')
  session_lib.fix_date(
      config, session_lib.model_folder(run_folder.read_config(folder), folder)
      if is_run else folder,
      run_folder.saved_date(folder), sample_file.saved_date(out))
  samples = sample_file.SampleFile(out, _identity(config, folder, step))
  processes.on_first(samples.check)
  if is_run:
    folder, params = restore.restore_params(
        folder, mesh_lib.make(config.mesh), step)
  with (lock_lib.FolderLock(out) as lock,
        session_lib.open_folder(config, folder) as session):
    evaluations = evaluation_lib.prepare(session)
    measured = texts.prepare(session)
    found = facts.of_model(session.folder) | facts.of_prompts(
        facts.data_sets({}, evaluations))
    agreement.check(lambda: found | facts.of_texts(measured))
    processes.on_first(lock.acquire)
    processes.on_first(
        samples.open, {item.name: item.samples for item in evaluations}, found)
    session_lib.cache_compilations(config)
    params = session.load_params() if params is None else params
    nats = {text.name: text.nats_per_token(params) for text in measured}
    params = sampling_lib.make_decode_cast(*session.decoding())(params)
    key = programs_lib.stream(config.seed, 'eval')
    try:
      for index, item in enumerate(evaluations):
        _run(item, params, jax.random.fold_in(key, index), samples, stop.check)
    except processes.Stopped:
      processes.on_first(samples.flush)
      raise errors.Interrupted(
          'stopped by SIGTERM; the same command resumes') from None
    # The others wait: of a large evaluation this may take minutes.
    processes.on_first(_finish, out, evaluations, samples, nats)


def _finish(out, evaluations, samples, nats):
  results = _results(evaluations, samples) | {results_lib.NATS: nats}
  files.replace_text(
      out / results_lib.RESULTS, json.dumps(results, indent=2) + '\n')
  if evaluations:
    print(results_lib.table(results))
  for name, value in nats.items():
    print(f'{name}: {value:.4f} nats per token')


def _checkpoint(config):
  if _CHECKPOINT.value is not None:
    return files.path(_CHECKPOINT.value)
  if config.model is None:
    raise errors.InputError(
        '--checkpoint is required if config.model is not set')
  return files.path(session_lib.model_folder(config, ''))


def _say_what_differs(config, workdir):
  """Names fields of the prompts that are not those of the run's training."""
  trained, asked = map(fields_lib.flat, (
      run_folder.read_config(workdir), config))
  for name in ('data.template', 'data.system', 'data.template_args',
               'rollout.stop', 'rollout.stop_ids'):
    was, now = trained.get(name), asked[name]
    # No system turn, '', is another than the template's own, None.
    if was != now and (was or now or name == 'data.system'):
      errors.note(
          f'note: {workdir} was trained with {name}={was!r}, and is evaluated '
          f'with {now!r}; --config.{name} sets it')


def _identity(config, checkpoint, step):
  """The settings that determine the samples."""
  fields = fields_lib.flat(config)
  kept = ('seed', 'data.template', 'data.system', 'data.template_args',
          'data.date', 'data.max_prompt_tokens', 'compute.dtype',
          'rollout.stop', 'rollout.stop_ids', 'grading.verifier',
          'grading.timeout')
  return {'checkpoint': str(checkpoint.resolve()), 'step': step} | {
      name: value for name, value in fields.items() if name in kept
      or name.startswith(('eval.', 'data.columns.'))
      and name not in ('eval.period', 'eval.before')}


def _run(item, params, key, samples, check):
  done = samples.done(item.name)  # nothing but on the first process
  is_done = processes.total(np.array(
      [prompt.problem.id in done for prompt in item.prompts], np.int32))
  todo = [p for p, skip in zip(item.prompts, is_done) if not skip]
  counts = collections.Counter()
  for groups, troubles in item.stream(params, key, todo, check):
    counts.update(troubles)
    for group in groups if processes.is_first() else []:
      samples.add(evaluation_lib.sample_lines(item.name, [group]))
  for name, count in counts.items():
    if count and processes.is_first():
      print(f'{item.name}: grading: {count} {name}', flush=True)


def _results(evaluations, samples):
  """The contents of results.json."""
  lines = samples.finish({
      item.name: [p.problem.id for p in item.prompts] for item in evaluations})
  first = [lines[item.name] for item in evaluations if item.is_first]
  return {
      'sets': {item.name: results_lib.summarize(
          lines[item.name], item.style, item.too_long)
               for item in evaluations},
      'first_decodings': [item.name for item in evaluations if item.is_first],
      **(results_lib.averages(first) if first else {})}


if __name__ == '__main__':
  cli.run(main, joins_job=True)
