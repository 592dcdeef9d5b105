"""Times of the scoring pass, the update and a whole step, by packing."""

from collections.abc import Iterator
import dataclasses
import functools

import jax
import ml_collections
import numpy as np

from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import packing
from tepo_jax.learning import update
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.benchmark import machine
from tepo_jax.tools.benchmark import registry
from tepo_jax.tools.benchmark import sampling
from tepo_jax.tools.benchmark import timing


@dataclasses.dataclass
class Case:
  """Compiled programs with a state and one minibatch to call them on."""
  programs: programs_lib.TrainingPrograms
  state: update.TrainState
  minibatch: packing.Minibatch
  old: update.OldPolicy | None
  efficiency: float

  def score(self):
    """Returns ℓ° and H° of the minibatch."""
    return self.programs.score(self.state.params, self.minibatch)

  def update(self):
    """Makes one update, which changes `state`; returns its loss."""
    self.state, metrics = self.programs.train_step(
        self.state, self.minibatch, jax.random.key(0), self.old)
    return metrics['loss']


def case(config: ml_collections.ConfigDict, workload: workload_lib.Workload,
         mode: str) -> Case:
  """Makes a case: random weights, and all completions as one minibatch.

  mode: of packing, or 'padded': one sequence a row.

  A config that shares prompts allows more packed tokens in attention than in
  the layers. Where `mode` does not share them, a microbatch gets attention's
  capacity, so that both modes process the same completions at a time.
  """
  config = config.copy_and_resolve_references()
  config.train.minibatch_prompts = workload.prompts
  config.data.max_prompt_tokens = workload.prompt_tokens
  config.rollout.max_tokens = workload.max_tokens
  mesh = mesh_lib.make(config.mesh)
  if config.train.packing == 'shared' != mode:
    packer = programs_lib.make_packer(config, mesh)
    config.train.microbatch_tokens = packer.shards * packer.row_tokens * (
        packer.rows(workload.prompts * workload.samples))
  config.train.packing = 'segments' if mode == 'padded' else mode
  programs, _ = memory_lib.fitted(config, programs_lib.make(
      config, programs_lib.prepare_model(workload.model, config, mesh), mesh),
      functools.partial(memory_lib.update_bytes, config))
  if mode == 'padded':
    programs = dataclasses.replace(
        programs, pack=dataclasses.replace(programs.pack, padded=True))
  params = jax.jit(
      functools.partial(transformer.init, workload.model),
      out_shardings=programs.state_sharding.params)(jax.random.key(0))
  packed = programs.pack(workload.random_batch()).replace(
      scored_at=np.int32(-1))  # as in the later updates of a step
  minibatch = mesh_lib.put(packed, programs.minibatch_sharding)
  old_logp_BT, old_entropy_BT = programs.score(params, minibatch)
  old = (programs.old_policy(params, minibatch)
         if programs.policy_loss.needs_kl else None)
  return Case(
      programs, programs.init_state(params),
      minibatch.replace(
          old_logp_BT=old_logp_BT, old_entropy_BT=old_entropy_BT,
          reference_logp_BT=(old_logp_BT if programs.policy_loss.needs_reference
                             else None)),
      old, packing.efficiency(packed))


def measure_growth(config, workload, peers) -> Iterator[timing.Measurement]:
  """Measures the update with one size of the workload halved at a time."""
  del peers
  model = workload.model
  halved = {
      'length': {'max_tokens': workload.max_tokens // 2,
                 'mean_tokens': workload.mean_tokens // 2},
      'prompts': {'prompts': workload.prompts // 2},
      'group': {'samples': workload.samples // 2},
      'vocabulary': {'model': dataclasses.replace(
          model, vocab_size=model.vocab_size // 2)}}
  mode = config.train.packing
  cases = {'whole': case(config, workload, mode)} | {
      name: case(config, dataclasses.replace(workload, **change), mode)
      for name, change in halved.items()}
  seconds = timing.interleaved(
      {name: c.update for name, c in cases.items()}, workload.rounds)
  for name in halved:
    yield timing.ratio(
        f'growth/half the {name}', seconds[name], seconds['whole'])


def measure_step(config, workload, peers) -> Iterator[timing.Measurement]:
  """Measures sampling, scoring and one update, with T tokens a completion."""
  workload = dataclasses.replace(workload, mean_tokens=workload.max_tokens)
  ours = case(config, workload, config.train.packing)
  engine = sampling.Engine(config, workload)
  queue = sampling.uniform(workload)
  schedule = engine.schedule(queue.length_QG.size)

  def step():
    engine.weights = ours.programs.to_decode(ours.state.params)
    engine.run(schedule, queue)
    jax.block_until_ready(ours.score())
    return ours.update()

  seconds = timing.interleaved({'ours': step} | _of_peers(
      peers, 'step', workload, config), workload.rounds)
  for name, values in seconds.items():
    yield timing.summary(f'step/{name}/seconds', values, 's')
  yield from _ratios('step', 'ours', seconds)


def _measure(config, workload, peers, what, name, passes):
  """Measures packings, peers and the machine's matrix product, interleaved."""
  modes = {'packed': 'segments', 'padded': 'padded'}
  if config.train.packing == 'shared':
    modes = {'shared': 'shared'} | modes
  cases = {how: case(config, workload, mode) for how, mode in modes.items()}
  product, product_flops = machine.product_of(workload.model.dtype)
  seconds = timing.interleaved(
      {how: getattr(c, what) for how, c in cases.items()}
      | _of_peers(peers, what, workload, config)
      | {'product': product}, workload.rounds)
  ceiling = product_flops / np.median(seconds.pop('product'))
  devices = next(iter(cases.values())).programs.mesh.devices.ravel()
  peak = machine.peak(devices, workload.model.dtype)
  rows = workload.prompts * workload.samples
  tokens = workload.prompt_tokens * rows + workload.lengths(rows).sum()
  for how, values in seconds.items():
    flops = passes * workload.forward_flops(shared=how == 'shared')
    yield timing.summary(f'{name}/{how}/seconds', values, 's')
    for quantity, work, unit in (
        ('tokens', tokens, 'token/s'), ('useful', flops, 'FLOP/s'),
        ('share of the machine\'s matmul', flops / ceiling, '1'),
        *([('useful share of peak', flops / peak, '1')] if peak else [])):
      yield timing.summary(
          f'{name}/{how}/{quantity}', [work / s for s in values], unit)
  for how, c in cases.items():
    yield timing.Measurement(f'{name}/{how}/slots real', c.efficiency, '1')
  yield from _ratios(name, next(iter(cases)), seconds)


def _of_peers(peers: registry.Peers, what, workload, config):
  """Returns each peer's method 'score', 'update' or 'step'."""
  batch = workload.random_batch()
  return {name: getattr(peer(workload, batch, config.optimizer), what)
          for name, peer in peers.items()}


# ℓ and H of one minibatch; forward, backward and optimiser.
measure_scoring = functools.partial(
    _measure, what='score', name='scoring', passes=1)
measure_update = functools.partial(
    _measure, what='update', name='update', passes=3)


def _ratios(name, ours, seconds):
  """Yields how many times longer the others took, by round."""
  for other in seconds.keys() - {ours}:
    yield timing.ratio(
        f'{name}/{other} over {ours}', seconds[other], seconds[ours])
