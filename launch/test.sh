#!/usr/bin/env bash
# Sets up and runs the quick tests on the CPU; -m '' runs all. -m gpu and -m tpu
# run, on a machine with one, the tests that need it. Arguments go to pytest.
#
#   launch/test.sh [-m gpu] [-k NAME ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
if [[ " $* " =~ \ -m\ (gpu|tpu)\  ]]; then
  SKIP_SELFTEST=1 launch/setup.sh "${BASH_REMATCH[1]}" tests
  exec env TEPO_TEST_DEVICE="${BASH_REMATCH[1]}" .venv/bin/python -m pytest \
    tests --numprocesses=0 -rA "$@"
fi
launch/setup.sh cpu tests
exec .venv/bin/python -m pytest tests --numprocesses=2 --dist=loadfile \
  --no-loadscope-reorder "$@"
