"""Every field of a run, with its meaning and the paper's setting (§4.1).

Other configs start from `get_config` and change what differs. There are no
other fields. A `placeholder` is None until a config or the command line sets
it. ★ marks the ten fields that users change first.
"""

import difflib

import ml_collections
from ml_collections import config_dict

from configs import methods


def get_config(method: str = 'tepo', beta: float = 1e-3):
  """The paper's sizes and optimiser; `method` is a row of methods.py."""
  c = ml_collections.ConfigDict()

  c.seed = 0  # of the data order, sampling and the embedded model
  c.steps = 80  # ★ rollout steps; the paper trains on about 80 x 64 prompts

  # ★ Hugging Face folder or hub id; None: the embedded model (`c.pretrain`).
  c.model = config_dict.placeholder(str)

  rows = methods.methods(beta)
  if method not in rows:
    near = difflib.get_close_matches(method, rows, 1)
    hint = f'did you mean {near[0]}? ' if near else ''
    raise ValueError(f'unknown method {method!r}: {hint}known methods: '
                     f'{", ".join(sorted(rows))}')
  c.method_name = method
  c.method = ml_collections.ConfigDict(rows[method])

  c.data = ml_collections.ConfigDict()
  # ★ Set of data/datasets.py; or a .jsonl, .json, .csv or .parquet file; or a
  # hub data set, OWNER/NAME[:SUBSET][@SPLIT].
  c.data.name = 'dapo_math'
  # Columns of `name`, and of `eval.sets`, where they are files or hub data
  # sets; None: found by name.
  c.data.columns = ml_collections.ConfigDict()
  c.data.columns.problem = config_dict.placeholder(str)
  c.data.columns.answer = config_dict.placeholder(str)  # the reference answer
  # Prompt template of data/prompts.py, or a .jinja file.
  c.data.template = 'qwen_boxed'
  # System turn; None: the template's own; '': none.
  c.data.system = config_dict.placeholder(str)
  c.data.max_prompt_tokens = 2048  # P; longer prompts are skipped and counted
  c.data.limit = config_dict.placeholder(int)  # first N problems; None: all
  c.data.skip_bad = 0  # bad rows to skip, with a warning; more are an error

  c.rollout = ml_collections.ConfigDict()
  c.rollout.prompts = 64  # ★ groups per rollout step
  c.rollout.samples = 8  # ★ G, the group size: completions per prompt
  c.rollout.max_tokens = 8192  # ★ T; longer completions are truncated
  c.rollout.temperature = 1.0  # of sampling and of the loss
  # Completions decoded at once, also in evaluation; None: all, or as many as
  # fit in memory.
  c.rollout.slots = config_dict.placeholder(int)
  # As mesh.tensor, for sampling on the same devices; None: the same.
  c.rollout.tensor = config_dict.placeholder(int)
  c.rollout.chunk = 32  # maximum decode steps per host sync
  # With the default reward, groups whose verdicts are all equal have no gradient.
  # 'refill': sample until there are `prompts` mixed groups; 'drop': sample
  # `prompts` groups and train on the mixed ones; 'off': train on all of them.
  c.rollout.dynamic_sampling = 'refill'
  # 'refill' samples at most this many times `prompts` prompts, then fails.
  c.rollout.max_generation_batches = 10
  # DAPO's soft length penalty on the last `overlong_buffer` tokens before
  # `max_tokens`; 0: none, as in the paper.
  c.rollout.overlong_buffer = 0
  c.rollout.overlong_factor = 1.0  # the penalty at `max_tokens`
  # Stop if the mean |log π| gap of sampler and trainer exceeds this (nats).
  c.rollout.logp_gap_limit = 0.05

  # The reward is Σ weight · function(completions), over 'accuracy' (1 for a
  # correct answer), rows of rollout/reward.py and your own 'module:function'.
  c.reward = ml_collections.ConfigDict()
  c.reward.functions = ('accuracy',)
  c.reward.weights = (1.0,)
  c.reward.timeout = 10  # seconds for a function and the samples of a prompt
  # When a function fails: 'stop' the run, or count its value as 'zero'.
  c.reward.on_failure = 'stop'

  c.grading = ml_collections.ConfigDict()
  c.grading.workers = 8  # processes that run math-verify
  c.grading.timeout = 10  # seconds per answer; a timeout counts as wrong

  c.train = ml_collections.ConfigDict()
  c.train.minibatch_prompts = 16  # groups per optimiser update
  # Passes over a rollout's minibatches, which stay the same: 2 x 64 / 16 = 8
  # updates.
  c.train.epochs = 2
  # How scoring and updates lay completions out. 'segments': several to a row;
  # 'shared': prompts are computed once per microbatch, attention rows stay
  # packed; this pays where prompts are a good part of the tokens.
  c.train.packing = 'segments'
  # ★ Tokens of one forward/backward pass over all devices; at least a row per
  # data x fsdp shard. Lower it if memory is short.
  c.train.microbatch_tokens = 16384
  c.train.chunk_size = 1024  # tokens per shard whose logits exist at once

  # Behaviour weights correct the surrogate for the sampler's probabilities,
  # which differ from the trainer's by rounding; r = π_old / π_sampler. 'token':
  # min(r, cap) of each token; 'sequence': min(r, cap) of each completion, r the
  # product over its tokens; 'off': none.
  c.train.behaviour = ml_collections.ConfigDict()
  c.train.behaviour.weight = 'off'
  c.train.behaviour.cap = 2.0
  c.train.behaviour.reject_below = 0.0  # r outside these bounds: weight 0
  c.train.behaviour.reject_above = float('inf')

  c.optimizer = ml_collections.ConfigDict()
  c.optimizer.learning_rate = 5e-7  # ★ constant
  c.optimizer.beta1 = 0.9
  c.optimizer.beta2 = 0.999
  c.optimizer.epsilon = 1e-8
  c.optimizer.weight_decay = 0.0
  c.optimizer.max_grad_norm = 1.0
  # Of Adam's first moment; bfloat16 saves 2 of 12 bytes per trained weight.
  c.optimizer.momentum_dtype = 'float32'

  c.compute = ml_collections.ConfigDict()
  # Of activations, sampling, and the layers' gradients until they are summed over
  # microbatches. That sum and the weights that are updated are fp32.
  c.compute.dtype = 'bfloat16'
  # What the backward pass recomputes, from most to least memory: 'none':
  # nothing; 'dots': all in a layer but its matrix products and attention;
  # 'mlp': also the products of its feed-forward part; 'full': whole layers.
  # 'auto': the first whose compiled update fits a device, from 'none' on a CPU
  # (half of the machine's memory), 'dots' elsewhere; a resumed run keeps its own.
  c.compute.remat = 'auto'
  c.compute.unroll = 1  # layers per iteration of the layer scan
  # Backend for scoring, updates and prefill: 'xla' anywhere, 'cudnn' on GPUs,
  # 'splash' on TPUs; 'auto': the device's own if it supports the model.
  c.compute.attention = 'auto'
  # How communication proceeds while a TPU scores and updates: 'plain', 'fused'
  # or 'sparsecore', see COLLECTIVES in job/programs.py; 'auto': by the chip.
  c.compute.collectives = 'auto'
  # Folder of compiled programs; None: JAX_COMPILATION_CACHE_DIR, or .jax_cache
  # next to the workdir.
  c.compute.cache = config_dict.placeholder(str)

  # Low-rank adapters. The base weights are frozen: compute dtype, no gradients,
  # no moments. Use 10 to 100 times the learning rate of full training.
  c.lora = ml_collections.ConfigDict()
  c.lora.rank = 0  # ★ 0: train all weights
  c.lora.alpha = 32.0  # adapters are scaled by alpha / rank
  c.lora.targets = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj',
                    'up_proj', 'down_proj')  # peft's names

  # Sizes of the mesh axes; -1: the devices that the other axes leave.
  c.mesh = ml_collections.ConfigDict()
  c.mesh.data = 1  # replicas of the parameters
  c.mesh.fsdp = -1  # shards of parameters and optimiser state
  c.mesh.tensor = 1  # ★ shards of vocabulary, heads and feed-forward width

  c.eval = ml_collections.ConfigDict()
  c.eval.sets = ('aime24', 'amc', 'math500')  # like data.name
  c.eval.period = 20  # rollout steps; also before and after training; 0: never
  c.eval.limit = config_dict.placeholder(int)  # first N problems of each set
  # Completions per problem and their temperature; None: the set's own (greedy,
  # or 32 samples at 0.6).
  c.eval.samples = config_dict.placeholder(int)
  c.eval.temperature = config_dict.placeholder(float)
  c.eval.greedy = False  # also decode greedily if the temperature is not 0
  c.eval.top_k = 0  # sample from the k most probable tokens; 0: from all
  c.eval.top_p = 1.0  # sample from the smallest set with this probability
  c.eval.stop_after_boxed = False  # stop after \boxed{…} closes
  c.eval.max_tokens = 8192  # longer completions are truncated

  # Besides the fields below, the best checkpoint is kept: of those saved with
  # an evaluation, the one with the highest avg@k of the first set in eval.sets.
  c.checkpoint = ml_collections.ConfigDict()
  c.checkpoint.period = 5  # rollout steps between checkpoints
  # Also save after a step if the last save is older than this; None: do not.
  c.checkpoint.minutes = config_dict.placeholder(float)
  c.checkpoint.keep = 2  # keep the latest N
  c.checkpoint.keep_every = 0  # keep the steps that are a multiple; 0: none

  # Rollouts on disk, one record per completion: see tepo_jax/rollout/dump.py.
  c.dump = ml_collections.ConfigDict()
  c.dump.period = 1  # rollout steps; 0: none
  c.dump.format = 'jsonl'  # or 'parquet'
  c.dump.max_megabytes = 2000.0  # of all files; the oldest are deleted first

  c.wandb_project = config_dict.placeholder(str)  # None: no Weights & Biases

  c.profile = ml_collections.ConfigDict()
  c.profile.steps = ()  # rollout steps traced to WORKDIR/profile, for xprof

  # The embedded model, made if `c.model` is None: a Qwen3-shaped network,
  # trained on worked solutions of `c.data.name`, then on a mixture with direct
  # answers.
  c.pretrain = ml_collections.ConfigDict()
  c.pretrain.worked_steps = 0  # 0: no model is made, set `c.model`
  c.pretrain.mixed_steps = 0
  c.pretrain.direct_share = 0.6  # of direct answers in the mixture
  c.pretrain.batch = 32  # demonstrations per update
  c.pretrain.demonstrations = 8000  # different problems
  c.pretrain.learning_rate = 6e-3  # peak, after a tenth of the steps
  c.pretrain.d_model = 64
  c.pretrain.num_layers = 3
  c.pretrain.num_heads = 2
  c.pretrain.num_kv_heads = 2
  c.pretrain.head_dim = 32
  c.pretrain.d_ff = 192

  # For tepo_jax.benchmark and tepo_jax.plan, with the model and sizes above.
  c.benchmark = ml_collections.ConfigDict()
  c.benchmark.vocabulary = 8192  # if `c.model` is None
  c.benchmark.prompt_tokens = 81  # the median of DAPO-Math
  # Mean completion length; at rollout.max_tokens all completions have it.
  c.benchmark.mean_tokens = 2048
  # Of groups, those with both right and wrong answers: dynamic sampling draws
  # more prompts where it is below 1.
  c.benchmark.mixed_share = 0.6
  c.benchmark.rounds = 5  # timed runs of each function
  return c
