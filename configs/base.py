"""Every field of a run, with its meaning: the paper's settings (§4.1).

Other configs start from `get_config` and change what differs. A field that is
not here does not exist; a `placeholder` must be given a value by the config
or on the command line, or says what None means.
"""

import ml_collections
from ml_collections import config_dict

from configs import methods


def get_config(method: str = 'tepo', beta: float = 1e-3):
  """The paper's geometry and optimiser; `method` is a row of methods.py."""
  c = ml_collections.ConfigDict()

  c.seed = 0  # of the data order, the sampler and a freshly made model
  c.steps = 80  # rollout steps; the paper trains on about 80 x 64 prompts

  # Hugging Face folder or hub id; None: the embedded model (`c.pretrain`).
  c.model = config_dict.placeholder(str)

  rows = methods.methods(beta)
  if method not in rows:
    raise ValueError(
        f'unknown method {method!r}; one of: {", ".join(sorted(rows))}')
  c.method_name = method
  c.method = ml_collections.ConfigDict(rows[method])

  c.data = ml_collections.ConfigDict()
  c.data.name = 'dapo_math'  # a name of tasks/datasets.py, or a local file
  c.data.template = 'qwen_boxed'  # a name of tasks/prompts.py
  c.data.max_prompt_tokens = 2048  # longer prompts are left out and counted
  c.data.limit = config_dict.placeholder(int)  # first N problems; None: all

  c.rollout = ml_collections.ConfigDict()
  c.rollout.prompts = 64  # groups a rollout step trains on
  c.rollout.samples = 8  # G, completions a prompt
  c.rollout.max_tokens = 8192  # T, completion slots; longer is truncated
  c.rollout.temperature = 1.0  # the loss scores at the same temperature
  # Completions decoded at one time; None: as many as there are, or as memory
  # allows. Evaluation takes the same number.
  c.rollout.slots = config_dict.placeholder(int)
  c.rollout.chunk = 32  # most decode steps between two looks of the host
  # Groups whose rewards are all equal teach nothing. 'refill': sample more
  # prompts until `prompts` mixed groups are there; 'drop': train on those
  # there are; 'off': train on all.
  c.rollout.dynamic_sampling = 'refill'
  c.rollout.max_generation_batches = 10  # bound of 'refill', then an error
  # DAPO's soft penalty on the last `overlong_buffer` tokens of the length
  # limit; 0 is off, as in the paper.
  c.rollout.overlong_buffer = 0
  c.rollout.overlong_factor = 1.0  # the penalty at the limit itself
  # Largest mean |log π| gap of sampler and trainer at which a run goes on.
  c.rollout.logp_gap_limit = 0.05

  c.grading = ml_collections.ConfigDict()
  c.grading.workers = 8  # processes that run math-verify
  c.grading.timeout = 10  # seconds an answer may take; then it is wrong

  c.train = ml_collections.ConfigDict()
  c.train.minibatch_prompts = 16  # groups an optimiser update sees
  c.train.epochs = 2  # passes over a rollout: 2 x 64 / 16 = 8 updates
  # How scoring and updates lay completions out. 'segments': several to a row;
  # 'shared': prompts are computed once per microbatch, attention rows stay
  # packed; this pays where prompts are a good part of the tokens.
  c.train.packing = 'segments'
  # With 'shared': slots of attention for each slot of the layers, in whole rows
  # of a shard. Prompts of 64 with 8 completions of 128 tokens need (64 + 128) /
  # (64 / 8 + 128) = 1.4.
  c.train.attention_room = 1.2
  # Slots of a row; None: the longest prompt and completion.
  c.train.row_tokens = config_dict.placeholder(int)
  # Slots of one forward/backward pass over the whole mesh, in whole rows: one
  # for each of its data x fsdp shards at least.
  c.train.microbatch_tokens = 16384
  c.train.chunk_size = 1024  # tokens of a shard whose logits exist at one time

  c.optimizer = ml_collections.ConfigDict()
  c.optimizer.learning_rate = 5e-7  # constant
  c.optimizer.beta1 = 0.9
  c.optimizer.beta2 = 0.999
  c.optimizer.epsilon = 1e-8
  c.optimizer.weight_decay = 0.0
  c.optimizer.max_grad_norm = 1.0

  c.compute = ml_collections.ConfigDict()
  c.compute.dtype = 'bfloat16'  # of activations and sampling; masters are fp32
  # What the backward pass computes again: 'none'; 'dots': all of a layer but
  # the outputs of its linear maps; 'full': all of it.
  c.compute.remat = 'full'
  # Of the layers' kernels in an update, and of the gradient of a microbatch;
  # gradients are summed in fp32.
  c.compute.gradient_dtype = 'bfloat16'
  c.compute.unroll = 1  # layers unrolled in one iteration of the layer scan
  # Of scoring, updates and prefill: 'xla' anywhere, 'cudnn' on GPUs, 'splash'
  # on TPUs; 'auto': the device's own where it can serve.
  c.compute.attention = 'auto'

  # Low-rank adapters: the model's own weights stay as they are, in the compute
  # dtype, without gradients or moments. Learning rates are 10 to 100 times
  # those of full training.
  c.lora = ml_collections.ConfigDict()
  c.lora.rank = 0  # 0: all weights are trained
  c.lora.alpha = 32.0  # an adapter is scaled by alpha / rank
  c.lora.targets = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj',
                    'up_proj', 'down_proj')  # as peft names them

  # Folder of compiled programs; None: .jax_cache beside the workdir, or what
  # JAX_COMPILATION_CACHE_DIR says.
  c.compute.cache = config_dict.placeholder(str)

  c.mesh = ml_collections.ConfigDict()  # sizes of the mesh axes; -1: the rest
  c.mesh.data = 1
  c.mesh.fsdp = -1
  c.mesh.tensor = 1

  c.eval = ml_collections.ConfigDict()
  c.eval.sets = ('aime24', 'amc', 'math500')  # of tasks/datasets.py, or files
  c.eval.period = 20  # rollout steps; also before and after; 0 is never
  c.eval.limit = config_dict.placeholder(int)  # first N problems of each set
  # None: the set's own decoding (greedy, or 32 samples at 0.6).
  c.eval.samples = config_dict.placeholder(int)
  c.eval.temperature = config_dict.placeholder(float)
  c.eval.greedy = False  # greedy decoding beside a sampled one
  c.eval.top_k = 0  # sample from the k most probable tokens; 0: from all
  c.eval.top_p = 1.0  # from the fewest that hold this probability; 1: all
  c.eval.stop_after_boxed = False  # a completion ends where its box closes
  c.eval.max_tokens = 8192

  # The best is the one with the highest avg@k of the first set in eval.sets,
  # of those that an evaluation fell on.
  c.checkpoint = ml_collections.ConfigDict()
  c.checkpoint.period = 5  # rollout steps
  c.checkpoint.keep = 2  # the newest N; and always the best, as below
  c.checkpoint.keep_every = 0  # steps that are a multiple stay too; 0: none

  # Rollouts on disk, one record a completion: see tepo_jax/rollout/dump.py.
  c.dump = ml_collections.ConfigDict()
  c.dump.period = 1  # rollout steps; 0: none
  c.dump.format = 'jsonl'  # or 'parquet'
  c.dump.max_megabytes = 2000.0  # of all of them; the oldest go first

  c.wandb_project = config_dict.placeholder(str)  # None: no Weights & Biases

  c.profile = ml_collections.ConfigDict()
  c.profile.steps = ()  # rollout steps traced to WORKDIR/profile, for xprof

  # The embedded model, made where `c.model` is None: a Qwen3-shaped network,
  # trained on worked solutions, then on a mixture with direct answers.
  c.pretrain = ml_collections.ConfigDict()
  c.pretrain.worked_steps = 0  # 0: none is made, a model must be given
  c.pretrain.mixed_steps = 0
  c.pretrain.direct_share = 0.6  # of direct answers in the mixture
  c.pretrain.batch = 32  # demonstrations an update
  c.pretrain.demonstrations = 8000  # different problems
  c.pretrain.learning_rate = 6e-3  # peak, after a tenth of the steps
  c.pretrain.d_model = 64
  c.pretrain.num_layers = 3
  c.pretrain.num_heads = 2
  c.pretrain.num_kv_heads = 2
  c.pretrain.head_dim = 32
  c.pretrain.d_ff = 192

  # Of tepo_jax.benchmark; its model and geometry are the fields above.
  c.benchmark = ml_collections.ConfigDict()
  c.benchmark.vocabulary = 8192  # where `c.model` is None
  c.benchmark.prompt_tokens = 81  # the median of DAPO-Math
  c.benchmark.mean_tokens = 2048  # of completions; max_tokens: all that long
  c.benchmark.rounds = 5  # timed runs of each function
  return c
