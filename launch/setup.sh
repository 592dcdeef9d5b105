#!/usr/bin/env bash
# Makes .venv and installs the pinned packages; skips what is up to date.
#
#   launch/setup.sh cpu [plan|tests]
#   launch/setup.sh gpu|tpu [tests]
#   launch/setup.sh apt PACKAGE...     apt-get install, once other installs end
#
# gpu installs the CUDA version that the driver supports, or CUDA=12|13, as on a
# login node without a driver. After installing, gpu and tpu run
# tepo_jax.selftest, unless SKIP_SELFTEST is set, as it must be on the hosts of a
# TPU slice, or there is no driver. plan adds the TPU and the GPU compiler, for
# tepo_jax.plan; tests adds these and the tests' packages. PACKAGES='NAME ...'
# adds packages of PyPI, such as wandb.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh

say() { echo "launch/setup.sh: $*" >&2; }
fail() { say "error: $*"; exit 2; }

# Prints the first Python >= 3.11 on the path. Ubuntu 22.04's python3.11 is a
# release candidate.
find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    if "$name" -c \
        'import sys; sys.exit(sys.version_info < (3, 11, 0, "final"))' \
        >/dev/null 2>&1; then
      echo "$name"
      return
    fi
  done
  return 1
}

# On Debian and Ubuntu, as root or with sudo. A fresh machine installs updates
# for minutes, during which apt-get fails: its option waits for dpkg's lock, but
# not for that of the lists.
apt_install() {
  local sudo=() left said
  command -v apt-get >/dev/null || return 1
  if [[ $EUID -ne 0 ]]; then
    command -v sudo >/dev/null || return 1
    sudo=(sudo)
  fi
  say "installing $* with apt-get"
  for (( left = 60; ; left-- )); do
    said=$(${sudo[@]+"${sudo[@]}"} apt-get update -qq 2>&1) && break
    [[ $said == *'Could not get lock'* && $left -gt 0 ]] \
      || { echo "$said" >&2; return 1; }
    sleep "${PAUSE:-10}"
  done
  ${sudo[@]+"${sudo[@]}"} apt-get -o DPkg::Lock::Timeout=600 install -y -qq \
    "$@" >&2
}

# Puts uv, which brings a Python of its own, into .uv; fails if PyPI is not
# reached or has none for this machine.
get_uv() {
  [[ -x .uv/bin/uv ]] && return
  python3 -m pip install --quiet --disable-pip-version-check --target .uv \
    "$(grep '^uv==' launch/constraints.txt)" >/dev/null 2>&1 || true
  [[ -x .uv/bin/uv ]]
}

has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

make_venv() {
  local python package
  if ! python=$(find_python); then
    say "making .venv with a Python 3.12 of uv's"
    python3 -m pip --version >/dev/null 2>&1 || apt_install python3-pip || true
    get_uv && .uv/bin/uv venv --quiet --clear --seed --python 3.12 .venv \
      && return
    apt_install python3.11 python3.11-venv || fail "Python >= 3.11 is needed"
    python=$(find_python) || fail "Python >= 3.11 is needed"
  fi
  if ! has_venv "$python"; then
    package=$("$python" -c \
      'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    apt_install "$package" || true
    has_venv "$python" || fail "$python has no venv module:" \
      "run sudo apt-get install $package and try again"
  fi
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
}

# up_to_date NAME FILE...: whether NAME was installed from these very files.
# record NAME FILE...: records that it was.
digest() { cat "$@" launch/constraints.txt launch/setup.sh | cksum; }
up_to_date() {
  [[ -x .venv/bin/python && -f .venv/.installed-$1 ]] \
    && [[ $(<".venv/.installed-$1") == "$(digest "${@:2}")" ]]
}
record() { digest "${@:2}" >".venv/.installed-$1"; }

# With uv on a TPU's hosts, where it saves minutes of each, if it can. Shows
# pip's output only if it fails: its warnings are for others.
pip_install() {
  local output
  [[ $kind == tpu ]] && get_uv && .uv/bin/uv pip install --quiet --python \
    .venv/bin/python --constraint launch/constraints.txt "$@" && return
  output=$(.venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --constraint launch/constraints.txt "$@" 2>&1) && return
  tail -n 20 <<<"$output" >&2
  return 1
}

# CUDA 13 needs driver 580 or later.
cuda_extra() {
  local driver
  [[ -z ${CUDA:-} ]] || { echo "cuda$CUDA"; return; }
  if [[ -f .venv/.cuda ]]; then cat .venv/.cuda; return; fi
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader \
    2>/dev/null | head -n 1) || true
  [[ $driver =~ ^([0-9]+) ]] || fail "no NVIDIA driver (nvidia-smi) found;" \
    "on a login node, set CUDA=12 or CUDA=13, as the nodes' driver supports"
  if (( BASH_REMATCH[1] >= 580 )); then echo cuda13; else echo cuda12; fi
}

# Both CUDA versions in one .venv would conflict.
check_cuda() {
  [[ -n ${CUDA:-} && -f .venv/.cuda ]] || return 0
  [[ $(<.venv/.cuda) == "cuda$CUDA" ]] || fail "CUDA=$CUDA: .venv has" \
    "$(<.venv/.cuda): remove .venv first"
}

usage="usage: launch/setup.sh cpu [plan|tests], or gpu|tpu [tests]"
[[ $# -ge 1 ]] || fail "$usage"
kind=$1
if [[ $kind == apt ]]; then apt_install "${@:2}"; exit; fi
[[ $# -le 2 && "$kind ${2:-tests}" =~ ^(cpu\ plan|(cpu|gpu|tpu)\ tests)$ ]] \
  || fail "$usage"

[[ $kind != gpu ]] || check_cuda
files=(requirements.txt)
if ! up_to_date "$kind" "${files[@]}"; then
  accelerator=()
  if [[ $kind != cpu ]]; then
    extra=tpu
    [[ $kind == tpu ]] || extra=$(cuda_extra)
    accelerator=("$(sed -n "s/^jax==/jax[$extra]==/p" requirements.txt)")
  fi
  .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
  say "installing into .venv (takes minutes the first time)"
  pip_install -r requirements.txt ${accelerator[@]+"${accelerator[@]}"} \
    || fail "pip could not install requirements.txt ${accelerator[*]-}"
  record "$kind" "${files[@]}"
  [[ $kind != gpu ]] || echo "$extra" >.venv/.cuda
  if [[ $kind != cpu && -z ${SKIP_SELFTEST:-}${CUDA:-} ]]; then
    say "testing the $kind (about a minute)"
    .venv/bin/python -m tepo_jax.selftest --device="$kind" >&2 \
      || say "the self-test failed, see above"
  fi
fi

if [[ -n ${PACKAGES:-} ]]; then
  read -ra packages <<<"$PACKAGES"
  pip_install "${packages[@]}" || fail "pip could not install $PACKAGES"
fi

# A machine with a GPU or TPU has its compiler. That for GPUs is not installed
# among the other packages, where jax would start it in every program.
compilers=(launch/gpu_compiler.txt tests/requirements.txt)
if [[ $kind == cpu && $# == 2 ]] && ! up_to_date plan "${compilers[@]}"; then
  say "installing the TPU and the GPU compiler"
  { pip_install "$(grep '^libtpu==' tests/requirements.txt)" \
    && pip_install --no-deps --upgrade --target .venv/gpu_compiler \
      -r launch/gpu_compiler.txt; } || fail "pip could not install the compilers"
  record plan "${compilers[@]}"
fi

files+=(tests/requirements.txt)
if [[ ${2:-} == tests ]] && ! up_to_date tests "${files[@]}"; then
  say "installing the tests' packages"
  # PyPI's torch comes with gigabytes of CUDA; PyTorch's own index has a CPU
  # build. If it cannot be reached, use PyPI's.
  torch=$(grep '^torch==' tests/requirements.txt)
  .venv/bin/python -m pip freeze 2>/dev/null | grep -E "^$torch([+]|\$)" >/dev/null \
    || pip_install --retries 1 --timeout 15 "$torch" \
      --index-url https://download.pytorch.org/whl/cpu 2>/dev/null \
    || say "cannot reach the CPU build of torch: installing PyPI's (large)"
  pip_install -r tests/requirements.txt \
    || fail "pip could not install tests/requirements.txt"
  record tests "${files[@]}"
fi
