"""The rotation in both its forms: in plain numpy, by complex numbers."""

import numpy as np
import pytest

from tepo_jax.policy import rope

ROTATE = {'chosen': rope.rotate, 'halves': rope._rotate_halves,
          'pairs': rope._rotate_pairs}


@pytest.mark.parametrize('form', ROTATE)
def test_pairs_turn_by_position_times_frequency(form):
  """Angles θ^(−2i/H) · position; positions of padding too."""
  rng = np.random.default_rng(0)
  x_BSNH = rng.normal(size=(2, 5, 3, 8)).astype(np.float32)
  position_BS = rng.integers(-1, 30, (2, 5))
  turn = rope.turn(position_BS, 8, 1e2)
  arguments = (x_BSNH, turn) if form == 'chosen' else (x_BSNH, *turn)
  got_BSNH = np.asarray(ROTATE[form](*arguments))
  angle_BS1I = position_BS[:, :, None, None] / 1e2 ** (np.arange(4) / 4)
  want_BSNI = (x_BSNH[..., :4] + 1j * x_BSNH[..., 4:]) * np.exp(1j * angle_BS1I)
  np.testing.assert_allclose(
      got_BSNH[..., :4] + 1j * got_BSNH[..., 4:], want_BSNI, rtol=0, atol=1e-5)
