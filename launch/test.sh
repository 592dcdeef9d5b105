#!/usr/bin/env bash
# Sets up and runs the quick tests on the CPU; -m '' runs all. Arguments go to
# pytest.
#
#   launch/test.sh [-k NAME ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh cpu tests
exec .venv/bin/python -m pytest tests --numprocesses=2 --dist=loadfile \
  --no-loadscope-reorder "$@"
