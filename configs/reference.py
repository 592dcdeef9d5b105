r"""Runs that others published, with their numbers, as configs of this project.

  python -m tepo_jax.train --config=configs/reference.py:slime_0_5b \
      --workdir=DIR

A row is one published run: what it reached, on what, in what time, where that
is written, and what differs here. A run that ends prints both its own
number and the published one. Everything is as published but for `differs` of
its row; what the source does not state is named there too. The sources were
read on 2026-11-26, and again on 2026-11-27. None of the rows has been run here
to its end.

All are GRPO: the token's importance weight, clipped; advantages within the
group divided by its standard deviation; the mean over all tokens, in
slime_0_5b that over completions of the mean over theirs; every group is
trained on.
"""

import dataclasses
from typing import Any

from configs import base

_VERL = 'https://github.com/volcengine/verl/blob/main/docs/algo/baseline.md'
_BOX = ('the prompt: the answer goes into a box (data.template), '
        "in the source after '####'")


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A published run.

  Attributes:
    model: hub id. metric: the recorded metric that stands for the published
      number. after, before: that number, a share, after training, and before
      it, if the source has that. machine, time: as the source states them.
    topology: of tepo_jax.plan, the machine or the nearest that it knows.
    devices: its number of chips. source: its address. differs: what is not as
      published, or not stated. fields: of the config, besides those of its
      task.
  """
  model: str
  metric: str
  after: float
  machine: str
  time: str
  topology: str
  devices: int
  source: str
  differs: tuple[str, ...]
  fields: dict[str, Any]
  before: float | None = None


def _gsm8k(**fields):
  """GSM8K's training split; greedy on all 1,319 problems of the test split."""
  return {
      'data.name': 'openai/gsm8k:main@train', 'data.max_prompt_tokens': 512,
      'rollout.max_tokens': 1024, 'eval.sets': ('gsm8k',),
      'eval.max_tokens': 1024} | {
          name.replace('__', '.'): value for name, value in fields.items()}


def _verl(model, after, time):
  """GRPO with adapters, one epoch; by the script and log of its table.

  The log has 0.1 % for the 0.5B before training, since only what follows '####'
  counts as an answer there.
  """
  return Recipe(
      model=f'Qwen/{model}', metric='eval/gsm8k/greedy/avg@1', after=after,
      machine='2 NVIDIA GPUs of more than 80 GiB, their kind is not stated',
      time=f'{time}, mostly its 24 evaluations', topology='h100x2',
      devices=2, source=_VERL,
      differs=(_BOX,
               "the order of the problems; in the source the file's",
               'no clip at a ratio of 3 where the advantage is negative'),
      fields=_gsm8k(
          steps=116, rollout__prompts=64, rollout__samples=5,
          train__minibatch_prompts=64, method__clip__high=0.2,
          method__reg__penalty='entropy', method__reg__region='all',
          method__reg__coef=-0.001, method__reference__coef=0.001,
          optimizer__learning_rate=3e-5, optimizer__weight_decay=0.01,
          lora__rank=32, lora__alpha=32.0))


ROWS = {
    'slime_0_5b': Recipe(
        model='Qwen/Qwen2.5-0.5B-Instruct', metric='eval/gsm8k/greedy/avg@1',
        after=0.5019, before=0.4359, machine='1 GB10 (DGX Spark)',
        time='1 h 11 min', topology='h100x1', devices=1,
        source='https://github.com/THUDM/slime/pull/1835',
        differs=('the words that ask for a box, the longest answer and the '
                 'updates of a step are not stated: 1,024 tokens, one update',
                 'nor are the mean over tokens, weight decay and beta2: by '
                 "slime's documentation and the pull request's own script, "
                 'scripts/run-qwen2.5-0.5B-gb10-smoke.sh'),
        fields=_gsm8k(
            steps=100, rollout__prompts=20, rollout__samples=8,
            train__minibatch_prompts=20, optimizer__learning_rate=1e-6,
            optimizer__weight_decay=0.1, optimizer__beta2=0.98,
            method__aggregate='seq_mean_token_mean')),
    'verl_0_5b_lora': _verl('Qwen2.5-0.5B-Instruct', 0.543, '7 h 34 min'),
    'verl_1_5b_lora': _verl('Qwen2.5-1.5B-Instruct', 0.779, '6 h 1 min'),
    'verl_3b_lora': _verl('Qwen2.5-3B-Instruct', 0.861, '7 h 12 min'),
    # The script of the commit that its table names, a95b699.
    'skyrl_1_5b': Recipe(
        model='Qwen/Qwen2.5-1.5B-Instruct', metric='eval/gsm8k/greedy/avg@1',
        after=0.796, machine='4 H100', time='not stated', topology='h100x4',
        devices=4, source='https://github.com/NovaSky-AI/SkyRL/blob/main/docs/'
        'content/docs/recipes/overview.mdx',
        differs=(_BOX,),
        fields=_gsm8k(
            steps=140, rollout__prompts=1024, rollout__samples=5,
            train__minibatch_prompts=256, method__clip__high=0.2,
            method__reference__coef=0.001,
            optimizer__learning_rate=1e-6, optimizer__weight_decay=0.01)),
    'maxtext_1_7b': Recipe(
        model='Qwen/Qwen3-1.7B', metric='eval/gsm8k/greedy/avg@1', after=0.8077,
        machine='TPU v6e 8x8', time='not stated', topology='v6e:8x8',
        devices=64, source='https://github.com/AI-Hypercomputer/maxtext/pull/'
        '4015',
        differs=('the number is a mean reward by a function of its own, on '
                 'which problems is not stated; here it is the accuracy on '
                 'the test split',
                 'batch, group, rate, clip and prompt are not stated: those '
                 'of slime_0_5b with 64 x 8'),
        fields=_gsm8k(
            steps=100, rollout__prompts=64, rollout__samples=8,
            train__minibatch_prompts=64, optimizer__learning_rate=1e-6)),
    # The first of three stages; the others, of 16K and 24K tokens, reach 0.3271
    # after 290 more steps and 0.3396 after 100 more. Numbers: the recipe's test
    # script, tests/test_suites/llm/grpo-deepscaler-1.5b-8K.sh.
    'nemo_r1_1_5b': Recipe(
        model='deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B',
        metric='eval/aime24/avg@16', after=0.2833, before=0.2396,
        machine='8 H100', time='not stated', topology='h100x8', devices=8,
        source='https://github.com/NVIDIA-NeMo/RL/blob/main/docs/guides/'
        'grpo-deepscaler.md',
        differs=('the prompt: a system turn; in the source a user turn with '
                 'the same request',
                 "the baseline: the group's mean; in the source the mean of "
                 'its others',
                 'the rate: rises evenly over 50 steps; in the source from a '
                 'tenth',
                 'prompts have at most 1,024 of the 8,192 tokens'),
        fields={
            'steps': 240, 'data.name':
            'agentica-org/DeepScaleR-Preview-Dataset',
            'data.max_prompt_tokens': 1024, 'rollout.prompts': 128,
            'rollout.samples': 8, 'rollout.max_tokens': 7168,
            'train.minibatch_prompts': 8, 'method.clip.high': 0.2,
            'optimizer.learning_rate': 2e-6, 'optimizer.warmup_steps': 50,
            'optimizer.weight_decay': 0.01,
            'eval.sets': ('aime24',), 'eval.samples': 16,
            'eval.temperature': 1.0, 'eval.max_tokens': 31_744}),
}


def get_config(name: str = 'slime_0_5b'):
  """The config of a row of ROWS."""
  if name not in ROWS:
    raise ValueError(f'no {name!r} in {", ".join(ROWS)}')
  row = ROWS[name]
  c = base.get_config('grpo')
  c.model = row.model
  c.rollout.dynamic_sampling = 'off'
  c.train.epochs = 1
  c.update_from_flattened_dict(row.fields)
  # Rows of the greatest length that a device computes at a time.
  longest = c.data.max_prompt_tokens + c.rollout.max_tokens
  c.train.microbatch_tokens = row.devices * longest * max(1, 12_288 // longest)
  c.published.metric, c.published.after = row.metric, row.after
  c.published.before, c.published.source = row.before, row.source
  return c
