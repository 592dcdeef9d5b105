#!/usr/bin/env bash
# One machine with NVIDIA GPUs: sets up and trains; arguments go to the program.
#
#   launch/gpu.sh --config=configs/tiny.py:tepo --workdir=DIR [--config.FIELD=…]
#
# A relative --workdir lies in the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh gpu
exec env JAX_PLATFORMS=cuda .venv/bin/python -m tepo_jax.train "$@"
