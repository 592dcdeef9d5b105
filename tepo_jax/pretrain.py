r"""Makes the embedded task's base model, as a Hugging Face folder.

  python -m tepo_jax.pretrain --config=configs/tiny.py --out=DIR

Next-token learning on demonstrations that mix short direct answers, which a
small model mostly gets wrong, with worked solutions, which it mostly gets
right, as real corpora do. `tepo_jax.train` does the same by itself where the
config names no model.
"""

import pathlib

from absl import flags

from tepo_jax import cli
from tepo_jax.job import base_model

_CONFIG = cli.DEFINE_config()
_OUT = flags.DEFINE_string(
    'out', None, 'Folder to make; must not exist or be empty.', required=True)


def main() -> None:
  loss = base_model.make(_CONFIG.value, pathlib.Path(_OUT.value))
  print(f'made {_OUT.value}: loss {loss:.3f} on its own demonstrations')


if __name__ == '__main__':
  cli.run(main)
