"""Rotary position embedding, and the scaling of its frequencies.

Axes: B rows, S columns, N heads (of queries or keys), H head size, I = H / 2
pairs.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How frequencies are lowered for contexts longer than the trained one.

  Fields and formulas are those of Hugging Face's `rope_parameters`; `kind` is
  'linear', 'llama3' or 'yarn'.
  """

  kind: str
  factor: float
  original_max_position: int = 0  # llama3, yarn

  # llama3 only
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0

  # yarn only
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float = 1.0
  truncate: bool = True


def longest(max_position: int, scaling: RopeScaling | None) -> int:
  """The most positions of a model with `max_position_embeddings`.

  Model cards that add yarn to a finished model leave that field as it was, so
  that the scaled context counts if it is longer.
  """
  if scaling is None or scaling.kind != 'yarn':
    return max_position
  return max(max_position, int(
      scaling.factor * scaling.original_max_position))


def frequencies(size: int, theta: float,
                scaling: RopeScaling | None = None) -> np.ndarray:
  """Angular frequency of each pair, in radians per position: float32 [I].

  Default: theta^(-2i/H). linear divides by the factor; llama3 divides the low
  frequencies and interpolates up to the high ones; yarn (arXiv 2309.00071)
  interpolates by pair index.
  """
  exponent_I = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
  fast_I = np.float32(1) / np.float32(theta) ** exponent_I
  if scaling is None:
    return fast_I
  slow_I = fast_I / np.float32(scaling.factor)
  if scaling.kind == 'linear':
    return slow_I
  if scaling.kind == 'llama3':
    periods_I = scaling.original_max_position * fast_I / (2 * np.pi)
    keep_I = (periods_I - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor)
  elif scaling.kind == 'yarn':
    keep_I = 1 - _yarn_ramp(size, theta, scaling)
  else:
    raise ValueError(f'unknown rope scaling {scaling.kind!r}')
  keep_I = np.clip(keep_I, 0, 1).astype(np.float32)
  return slow_I * (1 - keep_I) + fast_I * keep_I


def _yarn_ramp(size, theta, scaling) -> np.ndarray:
  """0 for pairs with many periods in the original context, 1 for few."""
  def pair(periods):
    """Fractional index of the pair with this number of periods."""
    return size * math.log(
        scaling.original_max_position / (periods * 2 * math.pi)
    ) / (2 * math.log(theta))

  low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, size - 1)
  high += 0.001 if low == high else 0
  return (np.arange(size // 2, dtype=np.float32) - low) / (high - low)


def rotation(position_BS, size: int, theta: float,
             scaling: RopeScaling | None = None):
  """(cos, sin) of the pairs' angles, each float32 [B, S, 1, I]."""
  angle_BS1I = position_BS[:, :, None, None] * frequencies(
      size, theta, scaling)
  factor = 1.0 if scaling is None else scaling.attention_factor
  return jnp.cos(angle_BS1I) * factor, jnp.sin(angle_BS1I) * factor


def rotate(x_BSNH, rotation):
  """Rotates the pairs (i, i + I) of each head by `rotation`, in float32."""
  cos_BS1I, sin_BS1I = rotation
  first, second = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate(
      [first * cos_BS1I - second * sin_BS1I,
       second * cos_BS1I + first * sin_BS1I], axis=-1).astype(x_BSNH.dtype)
