#!/usr/bin/env bash
# Makes .venv and installs the pinned packages. Run again, it does what changed.
#
#   launch/setup.sh cpu|gpu|tpu [tests]
#
# gpu takes the CUDA that the driver supports; tests adds what the tests need.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "launch/setup.sh: $*" >&2; }
fail() { say "error: $*"; exit 2; }

usage="usage: launch/setup.sh cpu|gpu|tpu [tests]"
[[ $# -ge 1 && $# -le 2 ]] || fail "$usage"
kind=$1
[[ $kind =~ ^(cpu|gpu|tpu)$ && ${2:-tests} == tests ]] || fail "$usage"

# The first Python >= 3.11 on the path.
find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
        >/dev/null 2>&1; then
      echo "$name"
      return
    fi
  done
  return 1
}

# Debian and Ubuntu: as root, or by sudo.
apt_install() {
  local sudo=()
  command -v apt-get >/dev/null || return 1
  if [[ $EUID -ne 0 ]]; then
    command -v sudo >/dev/null || return 1
    sudo=(sudo)
  fi
  say "installing $* with apt-get"
  "${sudo[@]}" apt-get update -qq >&2 \
    && "${sudo[@]}" apt-get install -y -qq "$@" >&2
}

has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

make_venv() {
  local python package
  if ! python=$(find_python); then
    apt_install python3.11 python3.11-venv || fail "Python >= 3.11 is needed"
    python=$(find_python) || fail "Python >= 3.11 is needed"
  fi
  if ! has_venv "$python"; then
    package=$("$python" -c \
      'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    apt_install "$package" || true
    has_venv "$python" || fail "$python has no venv module:" \
      "sudo apt-get install $package, then run this again"
  fi
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
}

# as_before NAME FILE...: what NAME installs from these files is installed.
# done_with NAME FILE... notes that it is.
digest() { cat "$@" launch/constraints.txt launch/setup.sh | sha256sum; }
as_before() {
  [[ -x .venv/bin/python && -f .venv/.installed-$1 ]] \
    && [[ $(<".venv/.installed-$1") == "$(digest "${@:2}")" ]]
}
done_with() { digest "${@:2}" >".venv/.installed-$1"; }

pip_install() {
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --constraint launch/constraints.txt "$@"
}

# The driver of CUDA 13 is 580 or later.
cuda_extra() {
  local driver
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader \
    2>/dev/null | head -n 1) || true
  [[ $driver =~ ^([0-9]+) ]] || fail "no NVIDIA driver (nvidia-smi) found"
  if (( BASH_REMATCH[1] >= 580 )); then echo cuda13; else echo cuda12; fi
}

files=(requirements.txt)
if ! as_before "$kind" "${files[@]}"; then
  accelerator=()
  if [[ $kind != cpu ]]; then
    extra=tpu
    [[ $kind == tpu ]] || extra=$(cuda_extra)
    accelerator=("$(sed -n "s/^jax==/jax[$extra]==/p" requirements.txt)")
  fi
  .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
  say "installing into .venv (minutes, the first time)"
  pip_install -r requirements.txt "${accelerator[@]}" \
    || fail "pip could not install requirements.txt ${accelerator[*]}"
  done_with "$kind" "${files[@]}"
fi

files+=(tests/requirements.txt)
if [[ ${2:-} == tests ]] && ! as_before tests "${files[@]}"; then
  say "installing what the tests need"
  # PyPI's torch brings gigabytes of CUDA along; the CPU build is elsewhere.
  # Where that is out of reach, PyPI's does as well.
  torch=$(grep '^torch==' tests/requirements.txt)
  .venv/bin/python -m pip show --quiet torch 2>/dev/null \
    || pip_install --retries 1 --timeout 15 "$torch" \
      --index-url https://download.pytorch.org/whl/cpu 2>/dev/null \
    || say "no CPU build of torch in reach: taking PyPI's, which is large"
  pip_install -r tests/requirements.txt \
    || fail "pip could not install tests/requirements.txt"
  done_with tests "${files[@]}"
fi
