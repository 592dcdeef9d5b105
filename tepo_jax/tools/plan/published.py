"""What others measured on these chips, and the efficiencies that follow.

An efficiency is the roofline of a piece of work over its measured time, where
the roofline is that of a compiled program, as in a plan. Of most rows only the
roofline by formula is known, which is shorter: they give a range. A cell, of a
phase and a chip, spans the ranges of its rows. A cell without a row borrows
another's and says whose. Rows of your own replace the others of their cell.

`launch/plans.sh published` prints the rows, the efficiencies, and what each
row's time would be predicted to be without that row.
"""

from collections.abc import Sequence
import dataclasses
import math
import statistics

from tepo_jax.policy import transformer
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import gpus

# A compiled program's roofline over that by formula, which counts no other data
# than weights and cache, and no waits. Of an update, the only row with both.
FORMULA_SHORT = 1.3
# A cell has at least this range around its mean, as a factor: more than the
# worst prediction of `held_out`, of a row and of a chip without its own rows.
LEAST_RANGE = 1.15
BORROWED_RANGE = 1.55  # also of your own rows, whose model is a small one
# A guess, as only one chip has rows of decoding. Small models are outside it:
# 64 sequences of a 0.5B on an H200 reached about 0.2 (launch/PLANS.md).
BORROWED_DECODE_RANGE = 2.5
# No program is assumed to do better than a v6e in a product of 8,192³, or in a
# copy. https://github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks
MOST, MOST_IN_DECODING = 0.90, 0.83
PHASES = ('update', 'score', 'prefill', 'decode')
# The phase whose efficiency a phase without rows takes: all but decoding are
# bound by arithmetic.
_LIKE = {'score': 'update', 'prefill': 'update'}
_NO_RECOMPUTATION, _LAYER = 'nothing', 'layer'


@dataclasses.dataclass(frozen=True)
class Row:
  """A measurement of somebody else, or of your own by `selftest --measure`.

  phase: of PHASES. chip: of chips.CHIPS or gpus.GPUS; count: of chips.
  model: its name and shape. rows: sequences per chip in an update, in decoding
    requests of all chips. length: tokens of a sequence; in decoding the mean
    context.
  seconds: of an update, or of one decode step.
  mesh, recomputed: as the source states them; with `compiled`, as compiled.
  source: where it was read; of your own row, the version of jax.
  compiled: seconds of the roofline, by this planner, of this project's program
    of the same shapes; None: `roofline` is by formula.
  """
  phase: str
  chip: str
  count: int
  name: str
  model: transformer.ModelConfig
  rows: int
  length: int
  seconds: float
  mesh: str
  recomputed: str
  source: str
  block: int = 2048
  fused: bool = True
  compiled: float | None = None

  @property
  def roofline(self) -> float:
    """Seconds of the same work at the data sheet's rates."""
    if self.compiled is not None:
      return self.compiled
    return (_decode_step if self.phase == 'decode' else _update)(self)

  @property
  def efficiency(self) -> float:
    """The stated roofline over the time; of a formula, the least it can be."""
    return self.roofline / self.seconds

  @property
  def highest(self) -> float:
    """The roofline over the time, if a formula's is as short as it can be."""
    if self.compiled is not None:
      return self.efficiency
    return max(self.efficiency, min(
        _most(self.phase), self.efficiency * FORMULA_SHORT))

  @property
  def middle(self) -> float:
    return math.sqrt(self.efficiency * self.highest)

  @property
  def is_own(self) -> bool:
    """Whether it is yours, by `selftest --measure`."""
    return not self.source.startswith('http')


@dataclasses.dataclass(frozen=True)
class Efficiency:
  """low, mid, high: compiled roofline over time. of: the rows it comes from."""
  low: float
  mid: float
  high: float
  of: str


def chip_of(name: str) -> chips.Chip:
  """The data sheet of a chip of `Row.chip`."""
  if name in chips.CHIPS:
    return chips.CHIPS[name]
  return gpus.chip_of(gpus.GPUS[name])


def name_of(kind: str) -> str | None:
  """The name in `Row.chip` of a kind of device, as jax names it; None if it has
  no data sheet."""
  kinds = {sheet.kind: name for name, sheet in chips.CHIPS.items()} | {
      gpu.name: name for name, gpu in gpus.GPUS.items()}
  return kinds.get(kind)


def _update(row: Row) -> float:
  """Returns the seconds of a forward and a backward pass, by arithmetic alone.

  Per token and layer: 6 FLOPs per weight, 2 more per weight whose product is
  recomputed, and attention over the blocks of a causal mask.
  """
  model, tokens = row.model, row.rows * row.length
  width = model.num_heads * model.head_dim
  again = _recomputed_weights(model, row.recomputed)
  layers = workload_lib.flops(model, tokens, 0, 0)
  head = workload_lib.flops(model, tokens, 0, tokens) - layers
  blocks = max(1, row.length // row.block)
  pairs = row.rows * row.length ** 2 * (blocks + 1) / (2 * blocks)
  products = 7 if row.fused else 9  # two forward, and five or seven backward
  if row.recomputed != _NO_RECOMPUTATION:
    products += 2
  attention = 2.0 * products * model.num_layers * width * pairs
  total = (3 * (layers + head) + attention
           + 2.0 * model.num_layers * again * tokens)
  return total / chip_of(row.chip).flops


def _recomputed_weights(model, recomputed):
  """Returns the weights per layer whose products the backward pass makes again;
  never the last ones, whose result no gradient needs."""
  width = model.num_heads * model.head_dim
  into_mlp, out = 2 * model.d_model * model.d_ff, model.d_model * width
  inputs = out + 2 * model.d_model * model.num_kv_heads * model.head_dim
  return {
      _NO_RECOMPUTATION: 0, 'attention': 0, 'mlp': into_mlp,
      'mlp and output projection': into_mlp + out,
      _LAYER: into_mlp + out + inputs}[recomputed]


def _decode_step(row: Row) -> float:
  """Returns the seconds to read weights, keys and values once, and to add up
  the layers' results over the chips, which share the heads; in bf16."""
  model, chip = row.model, chip_of(row.chip)
  weights = workload_lib.flops(model, 1, 0, 1)  # 2 FLOPs, or bytes, a weight
  cache = 4.0 * row.rows * row.length * (
      model.num_layers * model.num_kv_heads * model.head_dim)
  sums = 2 * model.num_layers
  sent = 2 * (row.count - 1) / row.count * 2.0 * row.rows * model.d_model
  return ((weights + cache) / row.count / chip.hbm_bandwidth
          + sums * (chip.latency + sent / chip.link_bandwidth))


def _model(vocab, width, layers, heads, kv_heads, size, hidden):
  return transformer.ModelConfig(
      vocab_size=vocab, d_model=width, num_layers=layers, num_heads=heads,
      num_kv_heads=kv_heads, head_dim=size, d_ff=hidden, max_position=8192)


_LLAMA3_8B = _model(128256, 4096, 32, 32, 8, 128, 14336)
_LLAMA3_70B = _model(128256, 8192, 80, 64, 8, 128, 28672)
_LLAMA2_7B = _model(32000, 4096, 32, 32, 32, 128, 11008)
_MISTRAL_7B = _model(32000, 4096, 32, 32, 8, 128, 14336)
_RECIPES = 'https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/'
_MAXTEXT = ('https://github.com/AI-Hypercomputer/maxtext/blob/'
            '0ed7bd529b9d690570473c3525d1efeda6b6c944/MaxText/configs/')


def _on_v6e(name, model, count, rows, seconds, folder,
            recomputed='mlp'):
  """A recipe's log line; rows of 8,192 tokens. MaxText offloads the inputs of
  the layers, queries, keys and values; the rest is computed again."""
  return Row('update', 'v6e', count, name, model, rows, 8192, seconds,
             f'fsdp {count}', recomputed, f'{_RECIPES}training/trillium/'
             f'{folder}/README.md')


def _by_rate(chip, count, name, model, rows, rate, mesh, recomputed):
  """A row of MaxText's tables, of 2,048 tokens, which state FLOP/s a chip. It
  counts 6 FLOPs per weight and token, and attention without the causal mask."""
  tokens = rows * 2048
  counted = 3 * workload_lib.flops(model, tokens, rows * 2048 ** 2, tokens)
  return Row('update', chip, count, name, model, rows, 2048, counted / rate,
             mesh, recomputed, f'{_MAXTEXT}{chip}/README.md', block=512,
             fused=False)


def _maxtext(layers, width):
  """A model of `global_parameter_scale`."""
  return _model(32768, width, layers, 64, 64, 128, 28672)


def _on_70b(requests, milliseconds):
  """1,000 tokens of prompt and 1,000 of completion; the median between tokens,
  as the mean has the prefills of others in it."""
  return Row('decode', 'v6e', 8, 'Llama-3.3-70B', _LLAMA3_70B, requests, 1500,
             milliseconds / 1e3, 'tensor 8', _NO_RECOMPUTATION,
             'https://github.com/yangwhale/tpu-recipes/tree/main/inference/'
             'trillium/vLLM/Llama3.x/README.md')


ROWS = (
    _on_v6e('Llama-3.1-8B', _LLAMA3_8B, 8, 3, 3.443,
            'Llama3.1-8B-MaxText/v6e-8'),
    _on_v6e('Llama-3.1-8B', _LLAMA3_8B, 16, 3, 3.393,
            'Llama3.1-8B-MaxText/v6e-16'),
    _on_v6e('Llama-3.1-8B', _LLAMA3_8B, 32, 3, 3.495,
            'Llama3.1-8B-MaxText/v6e-32'),
    _on_v6e('Llama-3.1-8B', _LLAMA3_8B, 256, 4, 4.546,
            'Llama3.1-8B-MaxText/v6e-256'),
    _on_v6e('Mistral-7B', _MISTRAL_7B, 8, 6, 6.320, 'Mistral-7B-MaxText'),
    _on_v6e('Llama-3.1-70B', _LLAMA3_70B, 32, 2, 17.790,
            'Llama3.1-70B-MaxText/v6e-32', 'mlp and output projection'),
    _by_rate('v5e', 256, 'MaxText 16B', _maxtext(32, 4096), 6, 120e12,
             'fsdp 256', _LAYER),
    _by_rate('v5e', 256, 'MaxText 32B', _maxtext(32, 8192), 4, 132e12,
             'fsdp 256', _LAYER),
    _by_rate('v5p', 64, 'MaxText 32B', _maxtext(32, 8192), 7, 328e12,
             'fsdp 16, tensor 4', 'attention'),
    _by_rate('v5p', 64, 'MaxText 64B', _maxtext(64, 8192), 3, 323e12,
             'fsdp 16, tensor 4', 'attention'),
    # The config that was compiled is not kept: that run's time, this project's
    # update of the same shapes.
    Row('update', 'h100', 8, 'Llama-2-7B', _LLAMA2_7B, 2, 4096, 0.721, 'fsdp 8',
        'attention', 'https://github.com/NVIDIA/JAX-Toolbox/blob/main/'
        'docs/frameworks/maxtext/README.md', block=128, compiled=0.476),
    _on_70b(64, 23.11),
    _on_70b(128, 30.73),
)


@dataclasses.dataclass(frozen=True)
class WholeStep:
  """A published step of another system, and its roofline by formula."""
  name: str
  seconds: float
  roofline: float
  source: str

  @property
  def slowdown(self) -> float:
    """Its time over the roofline that compiled programs would have."""
    return self.seconds / (self.roofline * FORMULA_SHORT)


def nemo_rl() -> WholeStep:
  """GRPO of Llama-3.1-8B on 16 H100: 2,048 completions, 1,019 tokens a sequence
  on average, of at most 4,096.

  Its roofline: each GPU decodes 128 sequences, until the longest, taken to
  reach 4,096 tokens, has ended; log-probabilities under the policy and a
  reference; a forward and backward pass over all tokens.
  """
  model, chip, count = _LLAMA3_8B, chip_of('h100'), 16
  sequences, mean, longest = 2048, 1019, 4096
  tokens = sequences * mean
  forward = workload_lib.flops(model, tokens, tokens * mean / 2, tokens)
  weights = workload_lib.flops(model, 1, 0, 1) * longest
  cache = 4.0 * sequences / count * mean ** 2 / 2 * (
      model.num_layers * model.num_kv_heads * model.head_dim)
  return WholeStep(
      'NeMo RL 0.5, Llama-3.1-8B on 16 H100', 92.8,
      (weights + cache) / chip.hbm_bandwidth
      + 5 * forward / count / chip.flops,
      'https://docs.nvidia.com/nemo/rl/0.5.0/about/performance-summary.html')


def efficiency(phase: str, chip: str, rows: Sequence[Row] = ROWS
               ) -> Efficiency:
  """The efficiency of a phase on a chip, or that of the nearest cell: the
  chip's for a similar phase, then that of chips of the same maker, then all.
  """
  phases = [phase, *([_LIKE[phase]] if phase in _LIKE else [])]
  is_tpu = chip in chips.CHIPS
  for is_near in (lambda x: x == chip, lambda x: (x in chips.CHIPS) == is_tpu,
                  lambda _: True):
    for like in phases:
      found = [r for r in rows if r.phase == like and is_near(r.chip)]
      if found:
        own = [r for r in found if r.is_own and r.chip == chip]
        return _summary(own or found, phase, chip)
  raise ValueError(f'no measurement of {phase}')


def _summary(rows, phase, chip):
  low, mid, high = (statistics.geometric_mean(values) for values in zip(*(
      (r.efficiency, r.middle, r.highest) for r in rows)))
  names = ' and '.join(sorted({f'{r.phase} on {r.chip}' for r in rows}))
  own = ' of your own' * all(row.is_own for row in rows)
  measured = f'{len(rows)} measurement{"s" * (len(rows) > 1)}{own}'
  borrowed = '' if names == f'{phase} on {chip}' else f' of {names}'
  least = _least_range(rows, chip)
  return Efficiency(
      min(low / least, *(r.efficiency for r in rows)), mid,
      max(min(_most(phase), high * least), *(r.highest for r in rows)),
      measured + borrowed)


def _least_range(rows, chip):
  if all(row.chip == chip and not row.is_own for row in rows):
    return LEAST_RANGE
  is_decoding = rows[0].phase == 'decode' and rows[0].chip != chip
  return BORROWED_DECODE_RANGE if is_decoding else BORROWED_RANGE


def _most(phase):
  return MOST_IN_DECODING if phase == 'decode' else MOST


def held_out(by_chip: bool = False, rows: Sequence[Row] = ROWS
             ) -> list[tuple[Row, float]]:
  """Each row with its predicted over its measured time, where the prediction
  does not know the row, or with `by_chip` no update or decoding of its chip;
  without the rows that nothing else can predict then."""
  found = []
  for row in rows:
    others = [r for r in rows if r != row and not (
        by_chip and (r.phase, r.chip) == (row.phase, row.chip))]
    if any(r.phase == row.phase for r in others):
      found.append((row, row.middle / efficiency(
          row.phase, row.chip, others).mid))
  return found


def source_of(row: Row) -> str:
  """The row as a line of ROWS."""
  m = row.model
  return (f'Row({row.phase!r}, {row.chip!r}, {row.count}, {row.name!r}, _model('
          f'{m.vocab_size}, {m.d_model}, {m.num_layers}, {m.num_heads}, '
          f'{m.num_kv_heads}, {m.head_dim}, {m.d_ff}), {row.rows}, '
          f'{row.length}, {row.seconds:.4g}, {row.mesh!r}, '
          f'{row.recomputed!r}, {row.source!r}, '
          f'compiled={row.compiled or row.roofline:.4g})')


def text() -> str:
  """Formats rows, efficiencies and held-out predictions as Markdown tables."""
  lines = ['| work | chips | sequences | tokens | seconds | roofline, s | '
           'share | predicted without it |', '|---' * 8 + '|']
  predicted = {id(row): f'{wrong:.0%} of measured' for row, wrong in held_out()}
  for row in ROWS:
    by = 'formula' if row.compiled is None else 'compiled'
    rows = f'{row.rows} a chip' if row.phase == 'update' else f'{row.rows}'
    name = row.name if row.is_own else f'[{row.name}]({row.source})'
    lines.append(
        f'| {row.phase}, {name} | {row.chip} x {row.count} | {rows} | '
        f'{row.length:,} | {row.seconds:.4g} | {row.roofline:.4g} ({by}) | '
        f'{row.efficiency:.2f} | {predicted.get(id(row), "")} |')
  other = nemo_rl()
  lines += [
      f'| whole step, [{other.name}]({other.source}) | | | | {other.seconds} | '
      f'{other.roofline:.3g} (formula) | {other.roofline / other.seconds:.2f} '
      '| |', '', '| | low | middle | high | from |', '|---' * 5 + '|']
  for chip in (*chips.CHIPS, *gpus.GPUS):
    alike = {}  # phases of the same efficiency
    for phase in PHASES:
      e = efficiency(phase, chip)
      alike.setdefault((e.low, e.mid, e.high), []).append((phase, e.of))
    for (low, mid, high), found in alike.items():
      phases, of = ', '.join(phase for phase, _ in found), found[0][1]
      lines.append(f'| {chip}: {phases} | {low:.2f} | {mid:.2f} | {high:.2f} '
                   f'| {of} |')
  return '\n'.join(lines)
