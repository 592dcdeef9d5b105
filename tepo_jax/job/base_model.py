"""Makes an embedded task's base model: trains it on demonstrations, saves it.

Axes: N problems · R = 2N demonstrations · S tokens · T = S − 1 predicted ones.
"""

import contextlib
import functools
import json
import os
import pathlib
import random
import tempfile

import jax
from jax import numpy as jnp
import ml_collections
import numpy as np
import optax
import transformers

from tepo_jax import errors
from tepo_jax.data import embedded
from tepo_jax.data import prompts
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import prompt_sets
from tepo_jax.learning import optimizer as optimizer_lib
from tepo_jax.learning import update
from tepo_jax.policy import layers
from tepo_jax.policy import scoring
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import progress as progress_lib

_DEMONSTRATIONS = 1_000_000  # first seed; the training problems' are lower


def make(config: ml_collections.ConfigDict, out: str | os.PathLike) -> None:
  """Makes the model folder `out` by `config.pretrain` and `config.seed`. It
  appears complete or not at all."""
  with tempfile.TemporaryDirectory() as scratch:
    tokenizer = make_tokenizer(config, scratch)
    model = model_config(config.pretrain, len(tokenizer))
    params = jax.jit(functools.partial(_init, model))(
        jax.random.key(config.seed))
    params = _train(
        config, programs_lib.execution(model, config.compute), params,
        _demonstrations(config, tokenizer))
    weights.save(out, model, params, source=scratch)


def make_tokenizer(config: ml_collections.ConfigDict, folder: str
                   ) -> transformers.PreTrainedTokenizerBase:
  """Writes and loads the model folder's files but config.json and weights."""
  with errors.naming('config.model is not set, and config.data.name'):
    embedded.build_tokenizer(config.data.name, folder)
  tokenizer = weights.load_tokenizer(folder)
  (pathlib.Path(folder) / 'generation_config.json').write_text(json.dumps({
      'eos_token_id': tokenizer.eos_token_id,
      'pad_token_id': tokenizer.pad_token_id}) + '\n')
  return tokenizer


def _train(config, model, params, demonstrations):
  """Trains on worked solutions first, then on a mixture with direct answers:
  mixed in from the start, they delay a small model's learning to add."""
  settings = config.pretrain
  total = settings.worked_steps + settings.mixed_steps
  optimizer = optimizer_lib.make(
      optax.warmup_cosine_decay_schedule(
          0, settings.learning_rate, total // 10, total),
      beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.01,
      max_grad_norm=1.0)
  state = update.TrainState(jnp.int32(0), params, optimizer.init(params))
  step = jax.jit(functools.partial(next_token_step, model, optimizer),
                 donate_argnums=0)
  generator = np.random.default_rng((config.seed, _DEMONSTRATIONS))
  with contextlib.closing(progress_lib.Progress(total)) as progress:
    for index in range(total):
      rows = generator.integers(settings.demonstrations, size=settings.batch)
      share = settings.direct_share if index >= settings.worked_steps else 0
      styles = (generator.random(settings.batch) < share).astype(int)
      state, loss = step(state, *(array[styles, rows]
                                  for array in demonstrations))
      if index % 50 == 0:
        progress.phase(
            f'making the base model: {index}/{total}, loss {float(loss):.3f}')
  return state.params


def _init(model, key):
  """Weights of standard deviation 1/√D: at D = 64, 0.02 learns slowly."""
  gain = model.d_model ** -0.5 / layers.INIT_STDDEV
  return jax.tree_util.tree_map_with_path(
      lambda path, x: x * gain if path[-1].key in ('kernel', 'embedding')
      else x, transformer.init(model, key))


def model_config(settings: ml_collections.ConfigDict,
                 vocabulary: int) -> transformer.ModelConfig:
  """The Qwen3-shaped model of `config.pretrain`."""
  return transformer.ModelConfig(
      vocab_size=vocabulary, d_model=settings.d_model,
      num_layers=settings.num_layers, num_heads=settings.num_heads,
      num_kv_heads=settings.num_kv_heads, head_dim=settings.head_dim,
      d_ff=settings.d_ff, max_position=1024, rope_theta=1e4,
      tie_embeddings=True, qk_norm=True)


def _demonstrations(config, tokenizer):
  """Tokenizes worked [0] and direct [1] solutions of N problems, right-padded.

  Returns token ids and positions, int32 [2, N, S], and the solutions' mask over
  the predicted tokens, float32 [2, N, T].
  """
  rng = random.Random(config.seed)
  problems = embedded.problems(
      config.data.name, 'train', config.pretrain.demonstrations,
      _DEMONSTRATIONS + config.seed)
  template = prompt_sets.template(config)
  rows, starts = [], []
  for style in ('worked', 'direct'):
    for problem in problems:
      prompt = prompts.render(template, tokenizer, problem)
      solution = embedded.made_task(config.data.name).demonstration(
          problem, rng, style)
      rows.append(
          prompt + tokenizer.encode(solution) + [tokenizer.eos_token_id])
      starts.append(len(prompt))
  width = max(map(len, rows))
  token_RS = np.zeros((len(rows), width), np.int32)
  position_RS = np.full((len(rows), width), -1, np.int32)
  for index, row in enumerate(rows):
    token_RS[index, :len(row)] = row
    position_RS[index, :len(row)] = np.arange(len(row))
  is_solution_RS = position_RS >= np.array(starts)[:, None]
  mask_RT = is_solution_RS[:, 1:].astype(np.float32)
  return [array.reshape(2, len(problems), -1)
          for array in (token_RS, position_RS, mask_RT)]


def next_token_step(
    model: transformer.ModelConfig, optimizer: optax.GradientTransformation,
    state: update.TrainState, token_BS: jax.Array, position_BS: jax.Array,
    mask_BT: jax.Array) -> tuple[update.TrainState, jax.Array]:
  """Makes one optimiser update; returns the new state and the loss before.

  The loss, in nats, is −Σ m log π(y_t | s_t) / Σ m over tokens but the first.
  """
  def loss(params):
    scores = scoring.score(model, params, token_BS, position_BS,
                           num_targets=mask_BT.shape[1])
    return -jnp.sum(mask_BT * scores.logp_BT) / jnp.sum(mask_BT)

  value, gradient = jax.value_and_grad(loss)(state.params)
  updates, opt_state = optimizer.update(
      gradient, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  return update.TrainState(state.step + 1, params, opt_state), value
