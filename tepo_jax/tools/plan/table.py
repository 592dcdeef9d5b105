"""Formats a plan as text and as JSON."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import gpus
from tepo_jax.tools.plan import published
from tepo_jax.tools.plan import run
from tepo_jax.tools.plan import step

_HEAD = (f'{"program":<28}{"runs":>7}{"HBM GiB":>9}{"args":>7}{"temp":>7}'
         f'{"held":>7}{"TFLOP":>9}{"useful":>9}{"GB":>9}{"ms":>9}{"wait":>8}  '
         f'{"bound":<8}'
         f'{"% of peak":>9}{"useful":>7}'
         f'{"compile s":>9}  sent, GB (times)')
# What is known of a plan for GPUs.
_ACCURACY = (
    f'compiled without a GPU: {gpus.USABLE:.0%} of the memory counts as '
    'usable, as launch/gpu.sh sets; GEMMs are untuned cuBLAS, the workspace of '
    'attention is that of cuDNN 9.28; compared with a device: the memory of '
    'the tiny config, on one H200')


def text(plan: step.StepPlan, workload: workload_lib.Workload,
         plans: Sequence[step.StepPlan], whole: run.Run) -> str:
  """Formats the programs, per chip and run; the phases; the whole run; and
  `plans` by mesh."""
  slice_ = plan.slice
  lines = [
      f'{slice_.name}: {len(slice_.devices)} chips of '
      f'{_gib(slice_.chip.hbm_bytes)} GiB, mesh {_mesh(plan)}, '
      f'{plan.slots} slots', _HEAD,
      *(_line(e, slice_.chip) for e in plan.estimates), *(
          f'{e.name}: compute.remat={e.remat}' for e in plan.estimates
          if e.remat), verdict(plan)]
  if slice_.devices[0].platform == 'gpu':
    lines.append(_ACCURACY)
  lines += [
      f'{e.name}: uncounted: {name}, {size / 1e6:.0f} MB'
      for e in plan.estimates for name, size in e.uncounted.items()]
  if plan.fits:
    mean = plan.tokens / (workload.prompts * workload.samples)
    lines += [
        f'a step of {workload.prompts} x {workload.samples} completions, '
        f'{workload.prompt_tokens} + {mean:.0f} tokens on '
        f'average: predicted {_range(plan.total)} s, '
        f'{plan.tokens_per_second_a_chip:.0f} tokens/s a chip',
        *(f'  {phase}: {_range(lambda bound: plan.seconds(bound)[phase])} s'
          for phase in plan.seconds()),
        *([f'completions are carried: a token is trained on {plan.age:.2f} '
           'rollout steps after it was drawn, on average'] if plan.age else []),
        *_efficiencies(plan), _whole(plan),
        *map(_rollout_line, plan.rollout_by_share.items()),
        *_run_lines(whole)]
  lines += ['meshes compared by their largest programs:', *(
      f'  {_mesh(p):<42}{p.slots:>5} slots  '
      + (_seconds(p.seconds(brief=True)) if p.fits else 'does not fit')
      for p in plans)]
  if best := step.best_of_two(plans):
    rollout, update, seconds = best
    lines.append(
        f'  {_mesh(update)} with rollout.tensor='
        f'{rollout.decoding["tensor"]}: {seconds:.0f} s, if it fits')
  return '\n'.join(lines)


def verdict(plan: step.StepPlan) -> str:
  """Says whether the plan fits, with the memory of the largest program."""
  worst = plan.worst
  if worst.failure:
    return f'does not fit: {worst.name}: {worst.failure}'
  says = 'fits' if plan.fits else 'does not fit'
  return (f'{says}: {worst.name} needs {_gib(worst.hbm)} of '
          f'{_gib(plan.slice.chip.hbm_bytes)} GiB '
          f'(arguments {_gib(worst.arguments)}, temporaries '
          f'{_gib(worst.temporaries)}, other arrays {_gib(worst.resident)})')


def record(plan: step.StepPlan, plans: Sequence[step.StepPlan],
           whole: run.Run) -> dict[str, Any]:
  """Returns the same for JSON, in bytes, FLOPs and seconds."""
  return {
      'topology': plan.slice.name, 'chips': len(plan.slice.devices),
      'hbm_bytes': plan.slice.chip.hbm_bytes, 'mesh': plan.mesh,
      'rollout_tensor': plan.decoding['tensor'],
      'slots': plan.slots, 'fits': plan.fits, 'verdict': verdict(plan),
      **{bound: plan.seconds(bound) if plan.fits else None
         for bound in step.BOUNDS},
      'roofline': plan.roofline if plan.fits else None,
      'run': dataclasses.asdict(whole) if plan.fits else None,
      'age_mean': plan.age if plan.fits else None,
      'rollout_by_share': plan.rollout_by_share if plan.fits else None,
      'tokens_per_second_a_chip':
          plan.tokens_per_second_a_chip if plan.fits else None,
      'programs': [dataclasses.asdict(e) for e in plan.estimates],
      'meshes': [{'mesh': p.mesh, 'slots': p.slots, 'fits': p.fits,
                  'seconds': p.seconds(brief=True)} for p in plans]}


def _seconds(by_phase):
  return (f'{sum(by_phase.values()):.0f} s (' + ', '.join(
      f'{name} {value:.1f}' for name, value in by_phase.items()) + ')')


def _range(seconds_of):
  """'80 to 120, most likely 100': the bounds of predicted seconds."""
  low, mid, high = map(seconds_of, step.BOUNDS)
  return (f'{_number(low)} to {_number(high)}, most likely {_number(mid)}')


def _number(seconds):
  return f'{seconds:.{0 if seconds >= 9.95 else 1}f}'


def _efficiencies(plan):
  """Says what divides the rooflines, and where it comes from."""
  by_kind = {e.name.split()[0]: e.efficiency for e in plan.estimates}
  yield 'share of the roofline that others reached (low, middle, high):'
  for kind, e in by_kind.items():
    yield f'  {kind:<8}{e.low:6.2f}{e.mid:6.2f}{e.high:6.2f}  {e.of}'


def _whole(plan):
  """Compares the step with a whole published one."""
  other = published.nemo_rl()
  return (f'the roofline of this step is {_number(plan.roofline)} s; a '
          f'published step took about {other.slowdown:.1f} times its own '
          f'({other.name}), which would be '
          f'{_number(other.slowdown * plan.roofline)} s')


def _rollout_line(item):
  share, (seconds, steps) = item
  return (f'  rollout if {share:.0%} of the groups are mixed: '
          f'{_range(seconds.get)} s, {steps} decode steps')


def _run_lines(whole):
  """Says how long a run takes, evaluations and saves included."""
  def time(seconds_of):
    size, unit = (3600, 'h') if seconds_of('high') >= 7200 else (60, 'min')
    return f'{_range(lambda bound: seconds_of(bound) / size)} {unit}'

  yield (f'a whole run: {time(whole.total)}: steps {time(whole.steps.get)}; '
         f'{whole.completions} completions of evaluations '
         f'{time(whole.evaluations.get)}; saves {time(whole.saves.get)}; '
         f'compilation {whole.compilation / 60:.0f} min as here, once')
  if whole.uncounted:
    yield f'  not counted: {"; ".join(whole.uncounted)}'


def _mesh(plan: step.StepPlan) -> str:
  tensor = plan.decoding['tensor']
  return ' '.join(f'{name}={size}' for name, size in plan.mesh.items()) + (
      f' rollout.tensor={tensor}' if tensor != plan.mesh['tensor'] else '')


def _line(e: step.Estimate, chip: chips.Chip) -> str:
  if e.failure:
    return f'{e.name:<28}{e.runs:>7.0f}  does not compile: {e.failure}'
  sent = ', '.join(
      f'{kind} {size / 1e9:.2f} ({e.collectives[kind]:.0f})'
      for kind, size in sorted(e.wire_bytes.items(), key=lambda x: -x[1]))
  return (
      f'{e.name:<28}{e.runs:>7.0f}{_gib(e.hbm):>9}{_gib(e.arguments):>7}'
      f'{_gib(e.temporaries):>7}{_gib(e.resident):>7}{e.flops / 1e12:>9.3g}'
      f'{e.useful / 1e12:>9.3g}{e.hbm_bytes / 1e9:>9.3g}'
      f'{e.roofline * 1e3:>9.3g}{e.waits * 1e3:>8.3g}  {e.bound:<8}'
      f'{100 * step.share_of_peak(e.flops, e, chip):>9.1f}'
      f'{100 * step.share_of_peak(e.useful, e, chip):>7.1f}'
      f'{e.compile_seconds:>9.0f}  {sent}')


def _gib(size: float) -> str:
  return f'{size / chips.GIB:.2f}'
