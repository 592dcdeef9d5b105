r"""Qwen models of 0.5B to 3B on one GPU, eight GPUs or a small TPU slice.

  python -m tepo_jax.train --config=configs/small.py:qwen2_5_1_5b,gpu80 \
      --workdir=DIR

The argument is MODEL,MACHINE of MODELS and MACHINES, and then, in any order:
`lora` trains adapters of rank 16; `dapo` trains on DAPO-Math instead of GSM8K;
a row of methods.py replaces tepo. launch/plans.sh plans them; launch/PLANS.md
has its tables: what fits, slots, seconds of a step. `train` warns of what does
not fit by them.

GSM8K: the training split, evaluated greedily on all 1,319 problems of the test
split. Its longest problem has 212 tokens (Qwen's tokenizer), to which the
template adds about 40; 1,024 tokens for an answer and the learning rate 1e-6
are those of verl's examples (run_qwen2_5-3b_gsm8k_grpo_lora.sh and
run_qwen2-7b.sh). 100 steps of 64 problems are 0.86 epochs,
or 1.4 if dynamic sampling keeps 60 % of the groups.

DAPO-Math: 99.9 % of its problems have at most 773 tokens. 4,096 for an answer
is the context for which Qwen2.5-Math was trained; the paper's 8,192 are for 7B
and more. Adapters learn at 10 times the rate (https://thinkingmachines.ai/blog/
lora, and the hint in base.py). A mean length of a quarter of
the longest, as `plan` has it, is an assumption.
"""

from configs import base

MODELS = {
    'qwen2_5_0_5b': 'Qwen/Qwen2.5-0.5B', 'qwen2_5_1_5b': 'Qwen/Qwen2.5-1.5B',
    'qwen2_5_3b': 'Qwen/Qwen2.5-3B', 'qwen3_0_6b': 'Qwen/Qwen3-0.6B',
    'qwen3_1_7b': 'Qwen/Qwen3-1.7B'}

# Machine -> topology of tepo_jax.plan, devices, tokens of a microbatch that a
# device computes at a time.
MACHINES = {
    'gpu24': ('rtx4090x1', 1, 5_120), 'gpu80': ('h100x1', 1, 10_240),
    'gpu80x8': ('h100x8', 8, 10_240), 'v5e1': ('v5e:1x1', 1, 5_120),
    'v5e8': ('v5e:2x4', 8, 5_120), 'v6e1': ('v6e:1x1', 1, 10_240)}
# Fields without which GSM8K does not fit, by the plan; the second table's are
# needed with all weights only, and the third's suit GSM8K's lengths only.
FIELDS = {('qwen2_5_3b', 'v5e8'): {
    'rollout.tensor': 2, 'train.chunk_size': 256}}
FULL_FIELDS = {('qwen2_5_1_5b', 'v6e1'): {
    'optimizer.momentum_dtype': 'bfloat16'}}
GSM8K_FIELDS = {
    ('qwen2_5_3b', 'v5e8'): {'train.microbatch_tokens': 8 * 2_560}}

# By launch/PLANS.md: models whose weights cannot all be trained on a machine;
# then those for which that holds with DAPO-Math only. Adapters always fit.
TOO_LARGE = {
    'gpu24': ['qwen2_5_1_5b', 'qwen2_5_3b', 'qwen3_1_7b'],
    'v5e1': ['qwen2_5_1_5b', 'qwen2_5_3b', 'qwen3_1_7b'],
    'v6e1': ['qwen2_5_3b', 'qwen3_1_7b']}
DAPO_TOO_LARGE = {'v5e1': ['qwen3_0_6b'], 'v5e8': ['qwen2_5_3b'],
                  'v6e1': ['qwen2_5_1_5b']}
_DEFAULT = 'qwen2_5_0_5b,gpu24'


def get_config(argument: str = _DEFAULT):
  """The config of MODEL,MACHINE[,lora][,dapo][,METHOD]."""
  model, _, rest = argument.partition(',')
  machine, *options = rest.split(',')
  for value, known in (model, MODELS), (machine, MACHINES):
    if value not in known:
      raise ValueError(f'{argument!r} must be MODEL,MACHINE[,OPTION…]: no '
                       f'{value!r} in {", ".join(known)}')
  rows = [o for o in options if o not in ('lora', 'dapo')]
  if len(rows) > 1:
    raise ValueError(f'{argument!r}: {" and ".join(rows)} cannot both be the '
                     'method; the other options are lora and dapo')
  c = base.get_config(*rows)
  c.model = MODELS[model]
  _, devices, tokens = MACHINES[machine]
  c.train.microbatch_tokens = devices * tokens  # a row of either data set fits
  c.update_from_flattened_dict(FIELDS.get((model, machine), {}))
  if 'dapo' in options:
    c.data.max_prompt_tokens, c.rollout.max_tokens = 1024, 4096
    c.eval.sets = ('math500', 'gsm8k')
    c.eval.max_tokens = 4096
  else:
    c.data.name = 'openai/gsm8k:main@train'
    c.data.max_prompt_tokens, c.rollout.max_tokens = 256, 1024
    c.eval.sets = ('gsm8k',)
    c.eval.max_tokens = 1024
    c.steps = 100
    c.update_from_flattened_dict(GSM8K_FIELDS.get((model, machine), {}))
  if 'lora' in options:
    c.lora.rank = 16
    c.optimizer.learning_rate = 1e-5
  else:
    c.optimizer.learning_rate = 1e-6
    c.update_from_flattened_dict(FULL_FIELDS.get((model, machine), {}))
  return c


def caution(config, argument: str = _DEFAULT) -> str | None:
  """What `train` warns of: a config that is planned not to fit its machine."""
  model, machine, *options = argument.split(',')
  too_large = [TOO_LARGE, *([DAPO_TOO_LARGE] if 'dapo' in options else [])]
  fitting = [name for name in MACHINES if not any(
      model in table.get(name, ()) for table in too_large)]
  if config.lora.rank or machine in fitting or config.model != MODELS[model]:
    return None
  return (f'{argument}: by the plans (launch/PLANS.md), training all weights '
          f'does not fit {machine}; what fits is adapters, {argument},lora, or '
          f'another machine: {", ".join(fitting)}')
