"""Low-rank adapters (arXiv 2106.09685): W + alpha / rank · A B.

The parameter tree holds them next to the kernels they adapt, as `lora_a` and
`lora_b`. This module splits the tree into a frozen base and trained adapters,
and combines the two again.

Axes: L layers, I inputs, O outputs, R rank.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# The linear maps of a layer by peft's names; ours lack the '_proj'.
TARGETS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj',
           'down_proj')
_LEAVES = ('lora_a', 'lora_b')


@dataclasses.dataclass(frozen=True)
class Lora:
  """rank: R; alpha: scale times rank; targets: a subset of TARGETS."""

  rank: int
  alpha: float
  targets: tuple[str, ...] = TARGETS

  @property
  def scale(self) -> float:
    return self.alpha / self.rank


def split(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """(base, adapters) of a parameter tree with any leaves."""
  base, adapters = {}, {}
  for key, node in tree.items():
    if not isinstance(node, dict):
      (adapters if key in _LEAVES else base)[key] = node
      continue
    below = split(node)
    for part, kept in zip((base, adapters), below):
      if kept:
        part[key] = kept
  return base, adapters


def combine(base: dict[str, Any] | None, adapters: dict[str, Any]
            ) -> dict[str, Any]:
  """The inverse of `split`; without a base, the adapters as they are."""
  if base is None:
    return adapters
  return base | {
      key: combine(base.get(key, {}), node) if isinstance(node, dict) else node
      for key, node in adapters.items()}


def merge(lora: Lora, base: dict[str, Any], adapters: dict[str, Any]
          ) -> dict[str, Any]:
  """The base with kernel + scale A B for each kernel, in its dtype."""
  def one(name, node):
    if name not in adapters['layers']:
      return node
    a_LIR, b_LRO = (adapters['layers'][name][leaf] for leaf in _LEAVES)
    change_LIO = lora.scale * jnp.einsum(
        'LIR,LRO->LIO', a_LIR, b_LRO, precision=jax.lax.Precision.HIGHEST)
    kernel_LIO = node['kernel'] + change_LIO
    return node | {'kernel': kernel_LIO.astype(node['kernel'].dtype)}

  return base | {'layers': {
      name: one(name, node) for name, node in base['layers'].items()}}
