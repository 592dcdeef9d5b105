"""Every field of a run: its default, meaning and range.

Other configs start from `get_config`, which has the paper's settings (§4.1),
and change what differs:

    c = base.get_config('grpo')
    c.rollout.samples = 16

There are no other fields, but for the method's (methods.py) and those of an
embedded model (PRETRAIN in tiny.py). A type in place of a default, such as
`int`, means None, until a value of that type is set. ★ marks the ten fields
that users change first. A resumed run may change only the
fields marked `resume`.
"""

import difflib
import math

import ml_collections

from configs import fields
from configs import methods


def _are_weighted(sets):
  """Whether `sets` are (set, weight) or (set, weight, template) of different
  sets."""
  return all(
      isinstance(item, tuple) and len(item) in (2, 3)
      and type(item[1]) is int and item[1] > 0
      and all(isinstance(text, str) and text for text in (item[0], *item[2:]))
      for item in sets) and len({item[0] for item in sets}) == len(sets)


def _are_different(names):
  """Whether they are texts, and none is there twice."""
  return (all(isinstance(name, str) for name in names)
          and len(set(names)) == len(names))


F = fields.Field
POSITIVE, NOT_NEGATIVE = fields.POSITIVE, fields.NOT_NEGATIVE
ROUNDING, FREE = fields.ROUNDING, fields.FREE

FIELDS = dict(
  seed=F(0, 'of the data order, sampling and the embedded model', fields.Range(
      '0 or more and less than 2^32', lambda x: 0 <= x < 2**32)),
  steps=F(80, '★ rollout steps; the paper trains on about 80 x 64 prompts',
          POSITIVE, resume=FREE),
  model=F(str, '★ Hugging Face folder or hub id; None: the embedded model, of '
          'configs that have a section `pretrain`'),
  method_name=F('tepo', 'row of methods.py; select it by --config=FILE.py:ROW. '
                'method.* are its choices and numbers'),

  data=dict(
    name=F('dapo_math', '★ set of data/datasets.py; or a .jsonl, .json, .csv '
           'or .parquet file; or a hub data set, '
           'OWNER/NAME[:SUBSET][@SPLIT]'),
    sets=F((), 'several sets instead of `data.name`, each (set, weight) or '
           '(set, weight, template): of any Σ weights consecutive prompts, '
           '`weight` are from that set', fields.Range(
               'tuples of a set, an integer weight of at least 1 and perhaps '
               'a template, and name no set twice', _are_weighted)),
    columns=dict(
        problem=F(str, 'column of the problem in the sets of training and '
                  '`eval.sets`, where they are files or hub data sets; '
                  'None: found by name'),
        answer=F(str, 'the same of the reference answer')),
    template=F('qwen_boxed', 'prompt template of data/prompts.py, or a '
               '.jinja file; of evaluation and of sets without their own'),
    system=F(str, "system turn; None: the template's own; '': none"),
    template_args=F(str, "arguments of the tokenizer's chat template, as "
                    "'enable_thinking=False'"),
    date=F(str, 'YYYY-MM-DD, the current date of chat templates that read the '
           'clock; None: the day on which the run began'),
    max_prompt_tokens=F(2048, 'P; longer prompts are skipped and counted',
                        POSITIVE),
    limit=F(int, 'first N problems of each set; None: all; of an embedded '
            'task, 10,000', POSITIVE),
    skip_bad=F(0, 'bad rows of each set to skip, with a warning; more are an '
               'error',
               NOT_NEGATIVE),
  ),

  rollout=dict(
    prompts=F(64, '★ groups per rollout step', POSITIVE),
    samples=F(8, '★ G, the group size: completions per prompt', fields.Range(
        "at least 2: the advantage compares a group's samples",
        lambda x: x >= 2)),
    max_tokens=F(8192, '★ T; longer completions are truncated', POSITIVE),
    temperature=F(1.0, 'of sampling and of the loss', POSITIVE),
    stop=F((), 'texts; a completion ends with the token that completes one of '
           'them, also in evaluation', fields.Range(
               'texts that are not empty', lambda x: all(
                   isinstance(text, str) and text for text in x))),
    stop_ids=F((), "token ids that end a completion besides the model's own, "
               'also in evaluation', fields.Range(
                   'token ids', lambda x: all(
                       type(token) is int and token >= 0 for token in x))),
    slots=F(int, 'completions decoded at once, also in evaluation; None: '
            'all, or as many as fit in memory', POSITIVE, resume=ROUNDING),
    tensor=F(int, 'as mesh.tensor, for sampling on the same devices; None: '
             'the same', POSITIVE, resume=ROUNDING),
    chunk=F(32, 'maximum decode steps per host sync', POSITIVE,
            resume=ROUNDING),
    cache=F('rectangle', "keys and values of decoding: 'rectangle': slots by "
            "columns, as wide as the longest completion so far; 'pages': "
            'only what is alive', fields.one_of('rectangle', 'pages'),
            resume=ROUNDING),
    weights=F('compute', "of the layers' matrices while rollouts are decoded: "
              "'compute': in compute.dtype; 'int8', with a scale for each "
              'output, which needs train.behaviour.weight. Evaluations always '
              'sample in compute.dtype', fields.one_of('compute', 'int8')),
    carry=dict(
        max_versions=F(
            0, 'V: unfinished completions are carried to the next rollout '
            'step, which continues them with its policy. No token is trained '
            'on more than V steps after it was drawn: a step completes the '
            'groups that would be older, and at most (V + 1) × '
            '`rollout.prompts` groups are in hand. Needs '
            'train.behaviour.weight. 0: each step waits for all of its '
            'completions', fields.up_to(100, least=0))),
    # With the default reward, groups whose verdicts are all equal have no
    # gradient.
    dynamic_sampling=F(
        'refill', "'refill': sample until there are `rollout.prompts` mixed "
        "groups, see `rollout.mixed`; 'drop': sample that many groups "
        "and train on the mixed ones; 'off': train on all of them",
        fields.one_of('refill', 'drop', 'off')),
    max_generation_batches=F(
        10, "'refill' samples at most this many times `rollout.prompts` "
        'prompts, then fails', fields.up_to(10_000),
        only_if=('rollout.dynamic_sampling', 'refill')),
    mixed=F('verdicts', "what differs in a group that counts as mixed: its "
            "'verdicts', or the 'reward', for rewards of your own; decoding "
            'then waits for the reward functions',
            fields.one_of('verdicts', 'reward'),
            unless=('rollout.dynamic_sampling', 'off')),
    max_left_out=F(
        0, "so many steps in a row in which 'refill' finds too few mixed "
        'groups are left out, without an update; one more fails', NOT_NEGATIVE,
        resume=FREE, only_if=('rollout.dynamic_sampling', 'refill')),
    overlong_buffer=F(
        0, "DAPO's soft length penalty on so many tokens before "
        '`rollout.max_tokens`; 0: none, as in the paper', NOT_NEGATIVE),
    overlong_factor=F(1.0, 'the penalty at `rollout.max_tokens`',
                      NOT_NEGATIVE, unless=('rollout.overlong_buffer', 0)),
    truncated=F(
        'count', "truncated completions: 'count': trained on like the others; "
        "'mask': left out of the loss and its denominators, but still in the "
        "baseline of their group (DAPO's overlong filtering); 'exclude': left "
        'out of the baseline too', fields.one_of('count', 'mask', 'exclude')),
    logp_gap_limit=F(0.05, 'stop if the mean |log π| gap of sampler and '
                     'trainer exceeds this (nats)', POSITIVE, resume=FREE),
  ),

  # The reward is Σ weight · function(completions).
  reward=dict(
    functions=F(('accuracy',), "'accuracy', which is 1 for a correct answer, "
                "rows of rollout/reward.py and your own 'module:function'"),
    weights=F((1.0,), 'of each function in the sum that is the reward'),
    timeout=F(10, 'seconds for a function and the samples of a prompt',
              fields.up_to(3600), unless=('reward.functions', ('accuracy',))),
    on_failure=F('stop', "when a function fails: 'stop' the run, or count "
                 "its value as 'zero'", fields.one_of('stop', 'zero'),
                 unless=('reward.functions', ('accuracy',))),
  ),

  grading=dict(
    workers=F(8, 'processes that run math-verify', POSITIVE,
              resume=ROUNDING),
    timeout=F(10, 'seconds per answer; a timeout counts as wrong',
              fields.up_to(3600, least=2)),
    verifier=F('own', "what decides: 'own', or 'math_verify', that library "
               'alone, to compare results with other code',
               fields.one_of('own', 'math_verify')),
  ),

  train=dict(
    minibatch_prompts=F(16, 'groups per optimiser update', POSITIVE),
    epochs=F(2, "passes over a rollout's minibatches, which stay the same: "
             '2 x 64 / 16 = 8 updates', POSITIVE),
    packing=F('segments', "how scoring and updates lay completions out: "
              "'segments': several to a row; 'shared': prompts are computed "
              'once per microbatch, attention rows stay packed, which pays '
              'where prompts are a good part of the tokens',
              fields.one_of('segments', 'shared')),
    shared_prefix=F(0, 'tokens with which all prompts begin, such as worked '
                    "examples: 'shared' computes them once per shard of a "
                    'microbatch, and this number gives its attention capacity '
                    'for the completions that then fit', NOT_NEGATIVE,
                    resume=ROUNDING, only_if=('train.packing', 'shared')),
    microbatch_tokens=F(
        16384, '★ tokens of one forward/backward pass over all devices; at '
        'least a row per data x fsdp shard. Lower it if memory is short',
        POSITIVE, resume=ROUNDING),
    chunk_size=F(1024, 'tokens per shard whose logits exist at once',
                 POSITIVE, resume=ROUNDING),
    # Behaviour weights correct the surrogate for the sampler's
    # probabilities, which differ from the trainer's by rounding;
    # r = π_old / π_sampler.
    behaviour=fields.unless(
        'train.behaviour.weight', 'off',
        weight=F('off', "corrects for the sampler's rounding, r = π_old / "
                 "π_sampler: 'token': min(r, cap) of each token; "
                 "'sequence': min(r, cap) of each completion, r the product "
                 "over its tokens; 'off': none",
                 fields.one_of('off', 'token', 'sequence')),
        cap=F(2.0, 'the largest weight', fields.AT_LEAST_ONE),
        reject_below=F(0.0, 'a smaller r has weight 0', fields.SHARE),
        reject_above=F(math.inf, 'a larger r has weight 0',
                       fields.AT_LEAST_ONE)),
  ),

  optimizer=dict(
    learning_rate=F(5e-7, '★ the largest, see `optimizer.schedule`', POSITIVE),
    schedule=F('constant', "the rate after the warm-up: 'constant'; 'linear' "
               "or 'cosine': falls from learning_rate to floor x learning_rate "
               'until rollout step schedule_steps, and then stays',
               fields.one_of('constant', 'linear', 'cosine')),
    warmup_steps=F(0, 'rollout steps W before the full rate: step s of them '
                   'has the share s / (W + 1)', NOT_NEGATIVE),
    schedule_steps=F(int, 'rollout steps after which the rate has fallen, the '
                     'warm-up included; `steps` may be another number',
                     POSITIVE, unless=('optimizer.schedule', 'constant')),
    floor=F(0.0, 'the last rate, as a share of learning_rate', fields.SHARE,
            unless=('optimizer.schedule', 'constant')),
    beta1=F(0.9, "decay of Adam's first moment", fields.BELOW_ONE),
    beta2=F(0.999, "decay of Adam's second moment", fields.BELOW_ONE),
    epsilon=F(1e-8, "of Adam", POSITIVE),
    weight_decay=F(0.0, 'decoupled, as in AdamW', NOT_NEGATIVE),
    max_grad_norm=F(1.0, 'longer gradients are scaled down to it', POSITIVE),
    momentum_dtype=F('float32', "of Adam's first moment; bfloat16 saves 2 of "
                     '12 bytes per trained weight',
                     fields.one_of('float32', 'bfloat16')),
  ),

  compute=dict(
    # The sum over microbatches and the weights that are updated are fp32.
    dtype=F('bfloat16', "of activations, sampling, and the layers' gradients "
            'until they are summed over microbatches',
            fields.one_of('float32', 'bfloat16')),
    remat=F('auto', 'what the backward pass recomputes, from most to least '
            "memory: 'none': nothing; 'dots': all in a layer but its matrix "
            "products and attention; 'mlp': also the products of its "
            "feed-forward part; 'full': whole layers. 'auto': the first whose "
            "compiled update fits a device, from 'none' on a CPU (half of the "
            "machine's memory), 'dots' elsewhere; a resumed run keeps its own",
            fields.one_of('auto', 'none', 'dots', 'mlp', 'full'), ROUNDING),
    attention=F('auto', "backend for scoring, updates and prefill: 'xla' "
                "anywhere, 'cudnn' on GPUs, 'splash' on TPUs; 'auto': the "
                "device's own if it supports the model",
                fields.one_of('auto', 'xla', 'cudnn', 'splash'), ROUNDING),
    heartbeat=F(300, 'seconds after which a silent process of a job of several '
                'counts as lost; a host that compiles may be silent',
                fields.up_to(86_400), resume=FREE),
    cache=F(str, 'folder of compiled programs; None: '
            "JAX_COMPILATION_CACHE_DIR, or tepo_jax in the user's cache folder",
            resume=FREE),
  ),

  # Low-rank adapters. The base weights are frozen: compute dtype, no
  # gradients, no moments. Use 10 to 100 times the learning rate of full
  # training.
  lora=fields.unless(
    'lora.rank', 0,
    rank=F(0, '★ of low-rank adapters; 0: train all weights', NOT_NEGATIVE),
    alpha=F(32.0, 'adapters are scaled by alpha / rank', POSITIVE),
    targets=F(('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj',
               'up_proj', 'down_proj'), "adapted layers, by peft's names",
              fields.some_of('q_proj', 'k_proj', 'v_proj', 'o_proj',
                             'gate_proj', 'up_proj', 'down_proj')),
  ),

  # Sizes of the mesh axes; -1: the devices that the other axes leave.
  mesh=dict(
    data=F(1, 'replicas of the parameters', resume=ROUNDING),
    fsdp=F(-1, 'shards of parameters and optimiser state; -1: the remaining '
           'devices', resume=ROUNDING),
    tensor=F(1, '★ shards of vocabulary, heads and feed-forward width',
             resume=ROUNDING),
  ),

  eval=fields.unless(
    'eval.period', 0,
    sets=F(('aime24', 'amc', 'math500'), 'like data.name', fields.Range(
        'names of sets or files, and none twice',
        lambda x: _are_different(x) and all(x))),
    period=F(20, 'rollout steps; also after the last one; 0: never',
             NOT_NEGATIVE),
    before=F(True, 'also before training'),
    texts=F((), 'files whose nats per token are measured too, to see what is '
            'forgotten: .txt; or .jsonl with rows of `text`, or of `prompt` '
            'and `completion`, which is scored', fields.Range(
                'names of .txt and .jsonl files, and none twice', lambda x:
                _are_different(x) and all(
                    name.endswith(('.txt', '.jsonl')) for name in x))),
    limit=F(int, 'first N problems of each set; None: all; of an embedded '
            'task, 10,000', POSITIVE),
    samples=F(int, "completions per problem; None: the set's own number, 1 "
              'or 32', POSITIVE),
    temperature=F(float, "None: the set's own, greedy or 0.6", fields.Range(
        '0 (greedy) or more', lambda x: 0 <= x < math.inf)),
    greedy=F(False, 'also decode greedily if the temperature is not 0'),
    top_k=F(0, 'sample from the k most probable tokens; 0: from all',
            NOT_NEGATIVE),
    top_p=F(1.0, 'sample from the smallest set with this probability',
            fields.POSITIVE_SHARE),
    stop_after_boxed=F(False, r'stop after \boxed{…} closes'),
    max_tokens=F(8192, 'longer completions are truncated', POSITIVE),
  ),

  # Besides these, the best checkpoint is kept: of those saved with an
  # evaluation, the one with the highest avg@k of the first set in eval.sets.
  checkpoint=dict(
    period=F(5, 'rollout steps between checkpoints', POSITIVE, resume=FREE),
    minutes=F(float, 'also save after a step if the last save is older than '
              'this; None: do not', POSITIVE, resume=FREE),
    keep=F(2, 'keep the latest N, and the best evaluated one', POSITIVE,
           resume=FREE),
    keep_every=F(0, 'keep the steps that are a multiple; 0: none',
                 NOT_NEGATIVE, resume=FREE),
  ),

  dump=fields.unless(
    'dump.period', 0,
    period=F(1, 'rollout steps between rollouts on disk, one record per '
             'completion (rollout/dump.py); 0: none', NOT_NEGATIVE,
             resume=FREE),
    format=F('jsonl', 'of rollouts', fields.one_of('jsonl', 'parquet')),
  ),

  # What somebody else's run of the same recipe reached (reference.py). A run
  # that ends prints its own number too.
  published=fields.unless(
    'published.metric', None,
    metric=F(str, 'the recorded metric of the published number, as '
             'eval/gsm8k/greedy/avg@1; None: there is none', resume=FREE),
    after=F(float, 'the published share after training', fields.SHARE,
            resume=FREE),
    before=F(float, 'and before training; None: unknown', fields.SHARE,
             resume=FREE),
    source=F(str, 'its address', resume=FREE),
  ),

  wandb_project=F(str, 'None: no Weights & Biases', resume=FREE),

  profile=dict(
    steps=F((), 'rollout steps traced to WORKDIR/profile, for xprof',
            fields.Range('rollout steps: integers from 1 on', lambda x: all(
                type(step) is int and step > 0 for step in x)),
            resume=FREE),
  ),
)


def get_config(method: str = 'tepo', beta: float = 1e-3):
  """The paper's sizes and optimiser; `method` is a row of methods.py."""
  rows = methods.methods(beta)
  if method not in rows:
    near = difflib.get_close_matches(method, rows, 1)
    hint = f'did you mean {near[0]}? ' if near else ''
    raise ValueError(f'unknown method {method!r}: {hint}known methods: '
                     f'{", ".join(sorted(rows))}')
  c = fields.config(FIELDS)
  c.method_name = method
  c.method = ml_collections.ConfigDict(rows[method])
  return c
