"""The optimiser: global-norm clipping, then AdamW, on fp32 masters."""

import optax


def make(learning_rate: float | optax.Schedule, *, beta1: float, beta2: float,
         epsilon: float, weight_decay: float, max_grad_norm: float,
         momentum_dtype: str = 'float32') -> optax.GradientTransformation:
  """AdamW after clipping the gradient's global norm (paper §4.1).

  The paper: learning rate 5e-7, constant; its other settings are unstated,
  and the defaults of configs/base.py are those of its code's base (verl).
  The parameters must be fp32: in bf16 an update of 5e-7 on a weight of 0.02
  rounds to nothing. `momentum_dtype` is that of the first moment; the second is
  kept in fp32, as its decay of 0.001 a step would round to nothing too.
  """
  return optax.chain(
      optax.clip_by_global_norm(max_grad_norm),
      optax.adamw(learning_rate, b1=beta1, b2=beta2, eps=epsilon,
                  weight_decay=weight_decay, mu_dtype=momentum_dtype))
