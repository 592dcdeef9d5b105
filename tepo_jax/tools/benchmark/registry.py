"""The libraries to compare with; each is imported only when asked for."""

from collections.abc import Callable, Mapping, Sequence
import importlib
import importlib.metadata
from typing import Any

from tepo_jax import errors

# name: (module, class, what it needs besides the project's requirements, as
# arguments of pip). Tunix without its dependencies: they would downgrade
# safetensors; listed is what its code imports.
PEERS = {
    'transformers': ('torch_peer', 'TorchUpdate', 'torch'),
    'trl': ('trl_peer', 'TrlUpdate', 'torch trl==1.16.0'),
    'tunix': ('tunix_peer', 'TunixUpdate',
              '--no-deps google-tunix==0.1.7 clu google-metrax jaxtyping '
              'perfetto sentencepiece wadler-lindig wrapt')}

# name: class, constructed with (workload, batch, optimizer config). Methods:
#   score() -> log π of the completion tokens.
#   update() -> loss; makes one update.
#   step() -> loss; samples T tokens per completion, scores, makes one update.
Peers = Mapping[str, Callable[..., Any]]


def load(names: Sequence[str]) -> Peers:
  """Imports the peers.

  Raises:
    errors.InputError: a peer is unknown, or a package it needs is missing.
  """
  for name in names:
    if name not in PEERS:
      raise errors.InputError(
          f'--peer: unknown peer {name!r}; one of: {", ".join(PEERS)}')
    requirements = PEERS[name][-1]
    for requirement in requirements.removeprefix('--no-deps ').split():
      package, _, version = requirement.partition('==')
      try:
        found = importlib.metadata.version(package)
      except importlib.metadata.PackageNotFoundError:
        found = None
      if found is None or version and found != version:
        state = f'{found} is' if found else 'is not'
        raise errors.InputError(
            f'--peer={name}: {package} {state} installed here; '
            f'pip install {requirements}')
  return {name: getattr(importlib.import_module(
      f'{__package__}.{PEERS[name][0]}'), PEERS[name][1]) for name in names}
