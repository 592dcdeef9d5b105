"""What a whole run takes besides its steps: evaluations, saves, compilation.

Seconds are {bound: seconds} by `step.BOUNDS`.
"""

import dataclasses

import ml_collections

from tepo_jax.data import datasets
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import step

# byte/s at which a host reads its chips' arrays, and at which it writes them to
# a disk or a bucket: assumptions.
_COPYING = dict(zip(step.BOUNDS, (20e9, 10e9, 5e9)))
_WRITING = dict(zip(step.BOUNDS, (2e9, 1e9, 0.3e9)))


@dataclasses.dataclass(frozen=True)
class Run:
  """Parts of a run that a user waits for.

  steps, evaluations, saves: seconds of all of them. completions: of the
  evaluations together. compilation: of the first start, on a machine like this
  one; later starts read the compiled programs from the cache.
  uncounted: what else the run does, whose time is not in these.
  """
  steps: dict[str, float]
  evaluations: dict[str, float]
  saves: dict[str, float]
  completions: int
  compilation: float
  uncounted: list[str]

  def total(self, bound: str) -> float:
    """Seconds of the whole run, with its first compilation."""
    return (self.steps[bound] + self.evaluations[bound] + self.saves[bound]
            + self.compilation)


def of(config: ml_collections.ConfigDict, workload: workload_lib.Workload,
       plan: step.StepPlan) -> Run:
  """Returns the parts of a run whose step is planned.

  A completion of an evaluation takes as long as one of a rollout, times the
  ratio of their `max_tokens`; of a rollout that carries none, as evaluations
  wait for their longest completions. A rollout samples 1 / mixed_share as many
  as it keeps.
  """
  evaluations, unknown = _completions(config)
  share = (workload.mixed_share
           if config.rollout.dynamic_sampling == 'refill' else 1.0)
  a_step = (workload.prompts * workload.samples / share
            * config.rollout.max_tokens / config.eval.max_tokens)
  steps = {bound: config.steps * plan.total(bound) for bound in step.BOUNDS}
  return Run(
      steps,
      {bound: plan.uncarried_rollout(bound) * evaluations / a_step
       for bound in step.BOUNDS},
      {bound: _saving(config, plan, bound) for bound in step.BOUNDS},
      evaluations, sum(e.compile_seconds for e in plan.estimates),
      list(_uncounted(config, unknown)))


def _completions(config):
  """Returns how many completions all evaluations sample, and the sets whose
  sizes are not known."""
  settings, total, unknown = config.eval, 0, []
  if not settings.period:
    return 0, []
  for name in settings.sets:
    samples, temperature = datasets.decoding(
        name, settings.samples, settings.temperature)
    known = datasets.SETS.get(name.partition(':')[0])
    sizes = [n for n in (settings.limit, known and known.rows[0]) if n]
    if not sizes:
      unknown.append(name)
      continue
    total += min(sizes) * (samples + (settings.greedy and temperature > 0))
  times = -(-config.steps // settings.period) + settings.before
  return total * times, unknown


def _uncounted(config, unknown):
  """Yields the parts of a run that have no seconds here."""
  if unknown:
    yield (f'evaluations of {", ".join(unknown)}, as their sizes are not known '
           '(set config.eval.limit)')
  if config.eval.texts and config.eval.period:
    yield 'the texts of config.eval.texts'
  if config.checkpoint.minutes is not None:
    yield 'saves by config.checkpoint.minutes'


def _saving(config, plan, bound):
  """Seconds that training waits for saves.

  A save copies the state to the hosts, one replica of it, and writes while the
  next steps run; the next save, and the end of the run, wait for it.
  """
  devices = plan.slice.devices
  hosts = len({d.process_index for d in devices})
  size = plan.state_bytes * len(devices) / plan.mesh['data'] / hosts
  copy, write = size / _COPYING[bound], size / _WRITING[bound]
  period = config.checkpoint.period
  saves = -(-config.steps // period)
  hidden = period * plan.total(bound)
  return saves * copy + (saves - 1) * max(0.0, write - hidden) + write
