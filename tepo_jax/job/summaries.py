"""Metrics of a rollout step; what a run prints: header, steps, closing table.
"""

from collections.abc import Mapping, Sequence
import os
import shlex
import shutil
import sys
import textwrap
from typing import Any

import ml_collections
import numpy as np

from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.data import datasets
from tepo_jax.job import configuration
from tepo_jax.job import results
from tepo_jax.job import session as session_lib
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import sampler
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import files
from tepo_jax.runtime import metrics

FEW = 5  # rows of the closing table
_SHOWN = 200  # characters of a completion in an error message
_BY_REWARD = 'set --config.rollout.mixed=reward'

LEGEND = (
    'Columns: reward and accuracy of the samples; entropy in nats; gradient '
    'norm\nbefore clipping; clip: share of tokens with an active clip bound; '
    'mean and max\ntokens of a completion; mixed: share of groups that count '
    'as mixed\n(rollout.mixed); tokens and seconds of a step.')


def rollout_metrics(rollout: sampler.Rollout) -> dict[str, float]:
  """Statistics over the groups up to the last one that is trained on.

  The surplus is left out: of the prompts behind that group, only those with
  short completions were completed.
  """
  groups = rollout.sampled
  return _of_groups(rollout, np.arange(rollout.count)) | {
      'response_length_max': max(g.length_G.max() for g in groups),
      'truncated_share': 1 - np.mean([g.ended_G for g in groups]),
      'groups_trained': len(rollout.groups)} | {
          f'reward/{name}': np.nan_to_num(part_NG[:rollout.count]).mean()
          for name, part_NG in rollout.rewards.parts.items()}


def _of_groups(rollout, indices):
  """The means over some of the groups of a rollout."""
  sampled = rollout.sampled
  groups = [sampled[n] for n in indices]
  return {
      'reward': rollout.rewards.reward_NG[indices].mean(),
      'accuracy': np.mean([g.accuracy_G for g in groups]),
      'response_length_mean': np.mean([g.length_G for g in groups]),
      'mixed_share': np.mean([rollout.mixed[n] for n in indices]),
      'groups_sampled': len(groups)}


def first_sample(rollout: sampler.Rollout) -> tuple[str, str]:
  """The verdict on the first completion of a step, and its text."""
  first = rollout.sampled[0]
  return 'correct' if first.accuracy_G[0] else 'wrong', first.text_G[0]


def set_metrics(rollout: sampler.Rollout, prompts: groups_lib.Mixture
                ) -> dict[str, float]:
  """As `rollout_metrics`, of each set of `prompts`: 'data/NAME/…'.

  NAME is by `datasets.short_names`. Every set has groups, as a step samples at
  least a period of the interleaving (`configuration.check`), unless completions
  are carried: a set without any is left out.
  """
  def sets_of(groups):
    return [prompts.name(group.prompt.prompt_id) for group in groups]

  trained, sampled = sets_of(rollout.groups), sets_of(rollout.sampled)
  found = {}
  for short, name in zip(datasets.short_names(list(prompts.sets)),
                         prompts.sets):
    indices = [n for n, each in enumerate(sampled) if each == name]
    if indices:
      of_set = _of_groups(rollout, indices) | {
          'groups_trained': trained.count(name)}
      found |= {f'data/{short}/{metric}': value
                for metric, value in of_set.items()}
  return found


def sampling_metrics(rollout: sampler.Rollout) -> dict[str, float]:
  """The work of the sampler, and how many of its tokens are of no use: those of
  the surplus, of completions that were stopped, and of those that were drawn
  again for lack of pages; the grader's counts."""
  stats = rollout.stats
  tokens, trained = (
      sum(int(g.length_G.sum()) for g in groups)
      for groups in (rollout.sampled, rollout.groups))
  return {
      'sampling/occupancy': stats.occupancy,
      # A step to which enough complete groups were carried decodes nothing.
      'sampling/slot_share': stats.tokens / max(1, stats.slot_steps),
      'sampling/steps': stats.steps, 'sampling/prefills': stats.prefills,
      'sampling/tokens': stats.tokens, 'sampling/tokens_trained': trained,
      'sampling/tokens_discarded': stats.tokens - tokens,
      'sampling/put_back': stats.put_back,
      'sampling/redrawn': stats.redrawn} | {
          f'grading/{name}': count for name, count in rollout.grading.items()}


def why_starved(rollout: sampler.Rollout, config: ml_collections.ConfigDict,
                style: str) -> str:
  """What a step without enough mixed groups shows: '; …', or nothing.

  style: of the answers.
  """
  texts = [text for group in rollout.completed for text in group.text_G]
  if texts and all(grading.extract(text, style) is None for text in texts):
    return (f'; no completion had an answer that could be read '
            f'(data.template={config.data.template}), for example: '
            f'{" ".join(texts[0].split())[:_SHOWN]!r}')
  varied = _differ_in_reward(rollout, config.rollout)
  if varied:
    return (f'; the reward differs in {varied} of the groups whose verdicts '
            f'agree: to learn from these too, {_BY_REWARD}')
  return ''


def _differ_in_reward(rollout, settings):
  """How many groups would be mixed only with rollout.mixed=reward."""
  if settings.mixed == 'reward':
    return 0
  return sum(
      groups_lib.differ(reward_G[group.ended_G]
                        if settings.truncated == 'exclude' else reward_G)
      for group, is_mixed, reward_G in zip(
          rollout.completed, rollout.mixed, rollout.rewards.reward_NG)
      if not is_mixed)


def average(history: list[dict[str, Any]]) -> dict[str, float]:
  """A step's mean over its updates, except for extremes and counts."""
  reduce = {'weight_min': np.min, 'weight_max': np.max, 'skipped': np.sum,
            'empty_minibatches': np.sum}
  return {name: reduce.get(name, np.mean)([h[name] for h in history])
          for name in history[0]}


def summary(scalars: dict[str, float]) -> str:
  """The progress line's summary of a step."""
  clipped = [scalars[f'clip_fraction_{part}'] for part in (
      'low', 'high', 'covariance') if f'clip_fraction_{part}' in scalars]
  shown = {'reward': 'reward', 'accuracy': 'accuracy', 'entropy': 'entropy',
           'grad_norm': 'gradient', 'response_length_mean': 'tokens',
           'response_length_max': 'max', 'mixed_share': 'mixed',
           'tokens_per_second': 'tokens/s', 'seconds/step': 'seconds'}
  parts = [f'{label} {scalars[name]:.{4 if scalars[name] >= 1000 else 3}g}'
           for name, label in shown.items() if name in scalars]
  if clipped:
    parts.insert(4, f'clip {sum(clipped):.2%}')
  return '  '.join(parts)


# What the progress on a terminal shows with its trend, by its column.
_TRENDS = {'reward': 'reward', 'accuracy': 'accuracy', 'entropy': 'entropy',
           'tokens': 'response_length_mean', 'mixed': 'mixed_share'}


def trends(scalars: Mapping[str, float]) -> dict[str, float]:
  """A step's values of which the terminal shows trends, by their columns."""
  return {column: value for column, name in _TRENDS.items()
          if (value := scalars.get(name)) is not None}


def evaluated(scalars: dict[str, float]) -> str:
  """The progress line's accuracies, empty if the step has no evaluation."""
  names = _averages(scalars) + _nats(scalars)
  return '  '.join(f'{name.removeprefix("eval/")} {_shown(name, scalars[name])}'
                   for name in names)


def results_table(workdir: files.Path) -> str:
  """The first, the last and the best recorded evaluation, in about five rows.

  These are avg@k of every set under each decoding; up to FEW rows, more of the
  first set; and the nats per token of texts. The best is that of the highest
  avg@k of the first set.
  """
  records = [r for r in metrics.read(workdir) if _averages(r) or _nats(r)]
  if not records:
    return 'no evaluation was recorded'
  first, last = records[0], records[-1]
  names = _averages(first)
  shown, titles = [first, last], [
      f'step {first["step"]}', f'step {last["step"]}']
  if names:  # else only texts were evaluated
    best = max(records, key=lambda r: r[names[0]])
    shown.append(best)
    titles.append(f'best, step {best["step"]}')
    largest = names[0].rpartition('@')[2]
    head = names[0].rpartition('/')[0]
    names += [name for part in (f'pass@{largest}', f'maj@{largest}',
                                'mean_length', 'truncated')
              if (name := f'{head}/{part}') in first][:max(0, FEW - len(names))]
  names += _nats(first)
  width = max(map(len, names)) - len('eval/')
  return '\n'.join(''.join([f'{name:<{width}}', *(
      f'{value:>{max(12, len(titles[-1]) + 2)}}' for value in values)])
      for name, values in [('', titles), *(
          (name.removeprefix('eval/'),
           [_shown(name, r[name]) for r in shown])
          for name in names)])


def published(settings: ml_collections.ConfigDict, workdir: files.Path) -> str:
  """This run's last value of a metric and the one that somebody else published;
  `settings` are `config.published`."""
  name = settings.metric
  records = [r for r in metrics.read(workdir) if name in r]
  here = ('was not recorded' if not records else
          f'{_shown(name, records[-1][name])} after step {records[-1]["step"]}')
  there = ', '.join(
      f'{_shown(name, value)} {when}' for value, when in (
          (settings.after, 'after training'), (settings.before, 'before'))
      if value is not None)
  source = f' ({settings.source})' if settings.source else ''
  return f'{name}: {here}; published: {there}{source}'


def _averages(record):
  return [name for name in record
          if name.startswith('eval/') and '/avg@' in name]


def _nats(record):
  return [name for name in record if name.endswith(f'/{results.NATS}')]


def _shown(name, value):
  if value is None:  # in metrics.jsonl
    return 'not finite'
  if name.endswith(results.NATS):
    return f'{value:.4f}'
  return f'{value:.1f}' if name.endswith('mean_length') else f'{value:.1%}'


def header(config: ml_collections.ConfigDict, session: session_lib.Session,
           workdir: files.Path, begins: str = 'new') -> str:
  """What is about to run, without what takes long to load.

  begins: 'new', or of which run it is a fork.
  """
  mesh = session.mesh
  saved = checkpoint.steps(workdir / session_lib.CHECKPOINTS)
  adapters = f', LoRA of rank {config.lora.rank}' if config.lora.rank else ''
  kinds = {device.device_kind for device in mesh.devices.flat}
  return _rows(
      method=config.method_name,
      model=f'{config.model or "embedded, made for this run"}: '
            f'{_short(session.parameters())} parameters{adapters}, '
            f'{config.compute.dtype}',
      devices=f'{mesh.devices.size} × {", ".join(sorted(kinds))}; mesh ' + (
          ', '.join(f'{name} {size}' for name, size in mesh.shape.items())),
      steps=f'{config.steps}, each {config.rollout.prompts} prompts × '
            f'{config.rollout.samples} completions of at most '
            f'{config.rollout.max_tokens:,} tokens',
      workdir=f'{workdir}, ' + (
          f'resumes after step {max(saved)}' if saved else begins))


def data(config: ml_collections.ConfigDict, prompts: groups_lib.Mixture,
         evaluations: Sequence[Any]) -> str:
  """The sizes of the data sets; `evaluations` are `evaluation.Evaluation`s."""
  sets = configuration.training_sets(config.data)
  return _rows(
      data='; '.join(
          f'{name}: {errors.counted(len(members), "problem")}' + (
              f', weight {weight}' if len(sets) > 1 else '')
          for (name, weight, _), members in zip(sets, prompts.sets.values())),
      evaluation='; '.join(
          f'{item.name}: {errors.counted(len(item.prompts), "problem")} × '
          f'{item.samples}'
          for item in evaluations) + f', every {config.eval.period} steps'
      if evaluations else 'none')


def _rows(**lines):
  """A line per name and text; on a terminal, long texts are broken between
  words and continue below their start."""
  if not sys.stdout.isatty():
    return '\n'.join(f'{name:<12}{text}' for name, text in lines.items())
  width = shutil.get_terminal_size().columns
  return '\n'.join(textwrap.fill(
      text, width, initial_indent=f'{name:<12}', subsequent_indent=12 * ' ',
      break_long_words=False, break_on_hyphens=False)
                   for name, text in lines.items())


def _short(count):
  """7615616512 -> '7.6B'."""
  for size, unit in ((1e9, 'B'), (1e6, 'M')):
    if count >= size / 10:
      return f'{count / size:.1f}{unit}'
  return f'{count:,}'


def stopped(how: str, workdir: files.Path, steps: int) -> str:
  """The last three lines of a run that was stopped: what is saved, and the
  command that resumes; TEPO_COMMAND, and its remark, if a launch script set
  them."""
  folder = workdir / session_lib.CHECKPOINTS
  if files.is_remote(workdir):  # whose list may take long to come
    saved = f'what is saved is in {folder}'
  elif found := checkpoint.steps(folder):
    saved = f'step {max(found)} of {steps} is saved in {folder}/{max(found)}'
  else:
    saved = 'no step was finished, so nothing is saved'
  command = os.environ.get('TEPO_COMMAND') or (
      f'.venv/bin/python -m tepo_jax.train {shlex.join(sys.argv[1:])}')
  remark = os.environ.get('TEPO_REMARK')
  to_resume = f'to resume ({remark}), run' if remark else 'to resume, run'
  return f'{how}; {saved}\n{to_resume}\n  {command}'


def next_command(workdir: files.Path) -> str:
  """The closing lines of a run that has made all its steps."""
  report = shlex.quote(str(workdir / 'report'))
  return (f'{workdir}: done; for figures and completions run\n'
          f'  .venv/bin/python -m tepo_jax.report --runs='
          f'{shlex.quote(str(workdir))} --out={report}')


def nothing_trained(config: ml_collections.ConfigDict, steps: int) -> str:
  """The error of a run that made all its `steps` without an update."""
  settings = config.rollout
  causes, mode = ['no gradient was finite'], settings.dynamic_sampling
  if settings.truncated != 'count':
    causes.insert(0, 'every completion to train on was truncated '
                     f'(rollout.truncated={settings.truncated})')
  if mode != 'off':
    causes.insert(0, 'no group was mixed' if mode == 'drop' else (
        f'fewer than rollout.prompts={settings.prompts} groups were mixed'))
  advice = mode != 'off' and settings.mixed == 'verdicts' and (
      f'; if your reward differs where verdicts agree, {_BY_REWARD}')
  return (f'none of the {steps} steps made an update: in each, '
          f'{", or ".join(causes)}{advice or ""}; the completions are in '
          f'{session_lib.ROLLOUTS}/')
