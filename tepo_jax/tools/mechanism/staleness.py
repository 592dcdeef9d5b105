"""The comparison of methods' gradients, policy by policy, and its resuming.

π_old is the model; the policies are what 0, 1, 4 and 8 updates of the config's
method on another rollout make of it. A minibatch's vectors are a file of their
own: a killed measurement repeats its sampling and at most one minibatch.
"""

from collections.abc import Callable, Mapping
import contextlib
import io
from typing import Any

import jax
import numpy as np

from tepo_jax import errors
from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import packing
from tepo_jax.learning import update
from tepo_jax.policy import scoring
from tepo_jax.policy.huggingface import weights
from tepo_jax.rollout import dump
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.runtime import files
from tepo_jax.runtime import host
from tepo_jax.runtime import progress as progress_lib
from tepo_jax.tools.mechanism import contrasts
from tepo_jax.tools.mechanism import directions
from tepo_jax.tools.mechanism import observe
from tepo_jax.tools.mechanism import results_file

COUNTS = (0, 1, 4, 8)  # updates; the first is 0
# Of those, where the gradient is divided by tokens: seven pullbacks more.
DIVIDED = COUNTS[0], COUNTS[-1]
POLICY, ROLLOUT = 'policy', 'rollout'  # folders: the last policy; π_old's


def run(lab: observe.Lab, results: dict[str, Any], minibatches: int,
        out: files.Path) -> None:
  """Measures what `results` lacks; writes them after each policy."""
  levels = results['levels']
  if all(str(count) in levels for count in COUNTS):
    return
  progress = progress_lib.Progress(2 * minibatches * len(COUNTS))
  with (contextlib.closing(progress),
        host.compilations_shown(progress.compiling, progress.compiled)):
    progress.begin(1)
    progress.phase('sampling the rollout of the updates')
    trained = lab.rollout()
    measurement = Measurement(lab, minibatches, out, progress, 1 + max(
        group.prompt.prompt_id for group in trained))
    for count, params in _policies(lab, trained):
      if count == COUNTS[-1] and not (out / POLICY).exists():
        folder = lab.session.folder
        weights.save(out / POLICY, weights.model_config(folder), params,
                     source=folder, dtype='float32')
      if str(count) in levels:
        measurement.skip()
        continue
      levels[str(count)] = measurement.level(count, params)
      results_file.write(results, out)


def _policies(lab, trained):
  yield 0, lab.start
  yield from lab.updates(trained, COUNTS[1:])


class Measurement:
  """One rollout of π_old, of so many minibatches, measured at policies."""

  def __init__(self, lab: observe.Lab, minibatches: int, out: files.Path,
               progress: progress_lib.Progress, cursor: int):
    """Samples the prompts from the cursor on."""
    self._lab, self._minibatches, self._out = lab, minibatches, out
    self._progress, self._done = progress, 0
    self._pull_back = directions.PullBack(lab)
    self._prompts = lab.training
    progress.phase('sampling the rollout to measure')
    rollout = self._select(lab.start, cursor)
    self._groups, self._cursor = rollout.groups, rollout.cursor
    dump.write(out / ROLLOUT, 1, dump.records(
        1, rollout, self._prompts.name, lab.session.template.style), 'jsonl')
    self._observed = observe.Observed(
        lab, self._groups, directions.ESTIMATOR)
    self._advantages = {}
    for name in directions.ESTIMATORS:
      batch = lab.batch(self._groups, name)
      self._advantages[name] = np.asarray(
          update.by_token(batch.advantage_B, batch.mask_BT))

  def _select(self, params, cursor):
    """A rollout of prompts that none before it had; InputError if they run out,
    as groups that share a prompt are not independent."""
    config = self._lab.config
    off = config.rollout.dynamic_sampling == 'off'
    wanted = self._minibatches * config.train.minibatch_prompts
    check_distinct(self._prompts, cursor + wanted, config.data.limit)
    rollout = self._lab.select(
        params, cursor, wanted, 'off' if off else 'refill')
    check_distinct(self._prompts, rollout.cursor, config.data.limit)
    return rollout

  def skip(self) -> None:
    """Counts a policy's minibatches as done."""
    self._done += 2 * self._minibatches

  def level(self, count: int, params: Any) -> dict[str, Any]:
    """The results at the policy after `count` updates."""
    x = self._observed.tokens(params)
    by_class = directions.classes(x, np.quantile(
        x.old_entropy_BT[x.mask_BT], (0.25, 0.5, 0.75)))
    divided = by_class if count in DIVIDED else {}
    found = self._vectors(
        str(count), params, self._observed.batch,
        lambda j, mine: self._slopes(x, divided, j, mine))
    vectors = dict(zip(directions.names(divided), directions.combined(found)))
    fresh = self._on_policy(count, params)
    [target_JC] = directions.combined(fresh)
    return dict(
        methods=contrasts.compare(
            vectors, target_JC, self._lab.config.optimizer.max_grad_norm),
        shares=contrasts.shares(vectors), kl=contrasts.of_kl(vectors),
        spread=contrasts.spread(x, by_class), tokens=contrasts.tokens_of_kl(
            x, self._groups, self._lab.session.tokenizer.decode),
        first_update=contrasts.first_update(vectors),
        sketch_error=directions.sketch_error(found + fresh),
        pullbacks=sum(int((y.square_GK > 0).sum()) for y in found + fresh))

  def _slopes(self, x, by_class, j, mine):
    return directions.slopes(
        _cut(x, mine), _cut(self._advantages, mine), jax.random.fold_in(
            programs_lib.stream(self._lab.config.seed, 'update'), j),
        _cut(by_class, mine))

  def _on_policy(self, count, params):
    """The policy gradient on fresh samples: of each minibatch's token mean."""
    self._progress.begin(self._done + 1)
    self._progress.phase(f'sampling fresh completions after {count} updates')
    groups = self._select(params, self._cursor).groups
    batch = self._lab.batch(groups, directions.ESTIMATOR)
    zeros_BT = np.zeros_like(batch.mask_BT)
    # The slope of this loss does not depend on the scores.
    x = observe.tokens(batch, scoring.Scores(zeros_BT, zeros_BT, zeros_BT))
    return self._vectors(
        f'{count}_fresh', params, batch, lambda j, mine: {
            'fresh': directions.of_loss(
                directions.POLICY_GRADIENT, _cut(x, mine))})

  def _vectors(self, name: str, params: Any, batch: packing.Batch,
               slopes: Callable[[int, slice], Mapping[Any, scoring.Scores]]
               ) -> list[directions.Vectors]:
    """Of each minibatch; from its file, if there is one."""
    found = []
    size = self._lab.config.train.minibatch_prompts * (
        self._lab.config.rollout.samples)
    for j in range(self._minibatches):
      self._done += 1
      path = self._out / f'sketches_{name}' / f'{j:04d}.npz'
      path.parent.mkdir(exist_ok=True)
      mine = slice(j * size, (j + 1) * size)
      if not path.exists():
        self._progress.begin(self._done)
        self._progress.phase(f'{name}: minibatch {j + 1}')
        vectors = self._pull_back(
            params, _cut(batch, mine), slopes(j, mine))
        with files.replacing(path) as temporary, temporary.open('wb') as file:
          np.savez(file, **vars(vectors))
        self._progress.step(self._done, '')
      with np.load(io.BytesIO(path.read_bytes())) as saved:
        found.append(directions.Vectors(**saved))
    return found


def check_distinct(prompts: groups_lib.Mixture, used: int, limit: int | None
                   ) -> None:
  """Raises an InputError if some of the first `used` prompts are repeated."""
  if used > (most := prompts.distinct()):
    raise errors.InputError(
        f'the rollouts need {used} prompts or more, but the data repeats after '
        f'{most}: lower --minibatches' + (
            f', or raise data.limit={limit}' if limit else ''))


def _cut(tree, mine):
  return jax.tree.map(lambda x: x[mine], tree)
