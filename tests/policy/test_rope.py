"""The rotation, against complex numbers in numpy."""

import numpy as np

from tepo_jax.policy import rope


def test_pairs_rotate_by_position_times_frequency():
  """Angles θ^(−2i/H) · position; at padding's position −1 too."""
  rng = np.random.default_rng(0)
  x_BSNH = rng.normal(size=(2, 5, 3, 8)).astype(np.float32)
  position_BS = rng.integers(-1, 30, (2, 5))
  got_BSNH = np.asarray(rope.rotate(
      x_BSNH, rope.rotation(position_BS, 8, 1e2)))
  angle_BS1I = position_BS[:, :, None, None] / 1e2 ** (np.arange(4) / 4)
  want_BSNI = (x_BSNH[..., :4] + 1j * x_BSNH[..., 4:]) * np.exp(1j * angle_BS1I)
  np.testing.assert_allclose(
      got_BSNH[..., :4] + 1j * got_BSNH[..., 4:], want_BSNI, rtol=0, atol=1e-5)
