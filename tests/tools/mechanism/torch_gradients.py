r"""Recomputes two methods' gradients in torch, from the files of a measurement.

  python tests/tools/mechanism/torch_gradients.py \
      --old=MODEL_FOLDER --out=DIR --groups=4

It shares no code with tepo_jax: transformers reads both folders, the losses
are written out here, and torch differentiates them. On the first minibatch
(--groups is config.train.minibatch_prompts) of DIR/rollout, at DIR/policy, it
compares the norms of the gradients of GRPO, TEPO and TEPO's KL, and their
cosines to GRPO's, with `first_update` in DIR/mechanism.json. Status 1 if any
differs by more than 2 %, of the norm, or 0.02 of a cosine, or is no number. For
rollout.temperature=1 and the default rows of configs/methods.py.
"""

import argparse
import json
import math
import pathlib
import sys

import torch
import transformers

LOW, HIGH, BETA = 0.8, 1.28, 1e-3
NAMES = {'grpo': 'grpo', 'tepo': 'tepo', 'kl': 'tepo_kl'}


def load(folder):
  return transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32).eval()


def scores(model, line):
  """log π of the tokens, their entropies, and all log π, of one completion."""
  prompt, tokens = line['prompt_ids'], line['token_ids']
  logits = model(torch.tensor([prompt + tokens])).logits[0]
  every = torch.log_softmax(logits[len(prompt) - 1:-1], -1)
  logp = every.gather(1, torch.tensor(tokens)[:, None])[:, 0]
  return logp, -(every.exp() * every).sum(-1), every


def advantages(lines):
  """(r - mean) / (std + 1e-6) of each prompt's completions."""
  by_prompt = {}
  for line in lines:
    by_prompt.setdefault(line['cursor'], []).append(line['reward'])
  found = {}
  for prompt, rewards in by_prompt.items():
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(
        sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    found[prompt] = [(r - mean) / (spread + 1e-6) for r in rewards]
  return [a for prompt in by_prompt for a in found[prompt]]


def losses(model, old_model, line, advantage, count):
  """The completion's part of the token means of GRPO, TEPO, and the KL in M."""
  with torch.no_grad():
    old_logp, old_entropy, old_every = scores(old_model, line)
  logp, entropy, every = scores(model, line)

  def surrogate(weight):
    return torch.minimum(
        weight * advantage, weight.clamp(LOW, HIGH) * advantage)

  ratio = (logp - old_logp).exp()
  sequence = (logp - old_logp).mean().exp().expand(len(logp))
  kl = (every.exp() * (every - old_every)).sum(-1)
  mask = (entropy.detach() < old_entropy) & (advantage > 0)
  penalty = kl[mask].sum() / count
  return dict(
      grpo=-surrogate(ratio).sum() / count, kl=penalty,
      tepo=-surrogate(sequence).sum() / count + BETA * penalty)


def gradients(model, old_model, lines):
  """Name -> the gradient, one vector."""
  parameters = [p for p in model.parameters() if p.requires_grad]
  count = sum(len(line['token_ids']) for line in lines)
  total = {name: [torch.zeros_like(p) for p in parameters] for name in NAMES}
  for line, advantage in zip(lines, advantages(lines)):
    parts = losses(model, old_model, line, advantage, count)
    for name, loss in parts.items():
      if advantage != 0 and loss.requires_grad:
        for sums, part in zip(total[name], torch.autograd.grad(
            loss, parameters, retain_graph=True, allow_unused=True)):
          if part is not None:
            sums += part
  return {name: torch.cat([x.flatten() for x in tree]).double()
          for name, tree in total.items()}


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--old', required=True)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--groups', type=int, required=True)
  given = parser.parse_args()
  lines = list(map(json.loads, (
      given.out / 'rollout' / 'step_000001.jsonl').read_text().splitlines()))
  results = json.loads((given.out / 'mechanism.json').read_text())
  size = given.groups * results['setup']['samples']
  lines = [line for line in lines if line['trained']][:size]
  found = gradients(load(given.out / 'policy'), load(given.old), lines)
  *_, last = results['levels'].values()
  every = []
  for name, key in NAMES.items():
    want = last['first_update'][key]
    norm = float(found[name].norm())
    cosine = float(found[name] @ found['grpo'] / (
        found[name].norm() * found['grpo'].norm()))
    gaps = want['norm'] / norm - 1, want['cosine'] - cosine
    every += map(abs, gaps)
    print(f'{key}: norm {norm:.6g}, here {want["norm"]:.6g} ({gaps[0]:+.2%}); '
          f'cosine to grpo {cosine:.4f}, here {want["cosine"]:.4f}')
  worst = max(every) if all(map(math.isfinite, every)) else math.nan
  print(f'largest difference: {worst:.2%}')
  sys.exit(not worst <= 0.02)


if __name__ == '__main__':
  main()
