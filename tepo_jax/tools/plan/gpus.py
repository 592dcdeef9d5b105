"""NVIDIA GPUs, and machines of them to compile for without one.

XLA's GPU compiler needs a description of the device, which it would otherwise
ask the driver for. What it then cannot know is corrected in `step` and `cost`:
how GEMMs are tuned, and the workspace of cuDNN's attention.
"""

import contextlib
import dataclasses
import importlib.util
import logging
import os
import pathlib
import sys

import jax
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies

from tepo_jax import errors
from tepo_jax.tools.plan import chips

# The share of the memory that launch/gpu.sh lets XLA allocate; the rest is for
# CUDA, cuDNN and NCCL. Not measured.
USABLE = 0.92
# Where launch/setup.sh installs the compiler.
FOLDER = pathlib.Path(sys.prefix) / 'gpu_compiler'
MACHINES = ('1', '2', '4', '8', '2x8')  # machines x GPUs of each

_LATENCY = 10e-6  # seconds of a collective besides its bytes; assumed
_CUDNN = 9, 10, 0  # the version to assume where there is none


@dataclasses.dataclass(frozen=True)
class Gpu:
  """One GPU's data sheet.

  name, capability: as the driver reports them. cores: multiprocessors, with
  `lanes` fp32 units, `threads` and `shared` bytes of shared memory each.
  l2, memory: bytes, as the driver reports them. clock: GHz. bandwidth: byte/s.
  flops: dense bf16 FLOP/s with fp32 sums. link: byte/s that a GPU sends to
  others of its machine, by NVLink or PCIe. network: byte/s that a GPU sends to
  other machines: one adapter per GPU, of 400 Gb/s (H100, H200), 200 (A100), or
  a share of 200 Gb/s.
  """
  name: str
  capability: tuple[int, int]
  cores: int
  lanes: int
  threads: int
  shared: int
  l2: int
  clock: float
  memory: int
  bandwidth: float
  flops: float
  link: float
  network: float


_MIB = 1 << 20
# https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306, the
# data sheets of H200, A100 and L40S, and the whitepaper of the Ada
# architecture; per core: CUDA C++ Programming Guide, compute capabilities.
GPUS = {
    'h100': Gpu('NVIDIA H100 80GB HBM3', (9, 0), 132, 128, 2048, 233472,
                50 * _MIB, 1.98, 84_942_979_072, 3.35e12, 989e12, 450e9, 50e9),
    'h200': Gpu('NVIDIA H200', (9, 0), 132, 128, 2048, 233472,
                50 * _MIB, 1.98, 151_397_597_184, 4.8e12, 989e12, 450e9, 50e9),
    'a100-80': Gpu('NVIDIA A100-SXM4-80GB', (8, 0), 108, 64, 2048, 167936,
                   40 * _MIB, 1.41, 85_100_068_864, 2.039e12, 312e12, 300e9,
                   25e9),
    'l40s': Gpu('NVIDIA L40S', (8, 9), 142, 128, 1536, 102400,
                96 * _MIB, 2.52, 47_800_000_000, 864e9, 362e12, 32e9, 3.1e9),
    'rtx4090': Gpu('NVIDIA GeForce RTX 4090', (8, 9), 128, 128, 1536, 102400,
                   72 * _MIB, 2.52, 25_300_000_000, 1008e9, 165e12, 32e9,
                   3.1e9),
}

# As in launch/gpu.sh.
RUN_OPTIONS = {'xla_gpu_enable_latency_hiding_scheduler': True}
_OPTIONS = RUN_OPTIONS | {
    # Without a device no GEMM is tuned: XLA would take the first of Triton's
    # kernels for it, which may not suit its shape, and without a workspace. So
    # all are cuBLAS's, with its workspace: 32 MiB on an H100.
    'xla_gpu_enable_triton_gemm': False, 'xla_gpu_autotune_level': 0,
    # Products of the same activations are not merged: cuBLAS, unlike Triton,
    # needs a copy of their weights in one array then.
    'xla_gpu_dot_merger_threshold_mb': 0,
    # CUB asks the device for the workspace of a large sort.
    'xla_gpu_enable_cub_radix_sort': False,
    # The code is never run. This changes neither the module nor its memory.
    'xla_backend_optimization_level': 0,
    'xla_gpu_disable_gpuasm_optimizations': True,
    'xla_llvm_disable_expensive_passes': True,
}

_SPEC = '''
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {optin}
  threads_per_core_limit: {threads}
  core_count: {cores}
  fpus_per_core: {lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  driver_version: "12.9.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "{dnn[0]}.{dnn[1]}.{dnn[2]}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {dnn[0]} minor: {dnn[1]} patch: {dnn[2]} }}
device_description_str: "{name}"
'''


def topology(name: str) -> chips.Slice:
  """Describes a machine named by a GPU of GPUS and a number of MACHINES.

  On several machines, all traffic is counted at the network's bandwidth.

  Raises:
    errors.InputError: there is no such machine, or the compiler is missing.
  """
  kind = next((kind for kind in GPUS if name.startswith(kind)), '')
  count = name.removeprefix(kind + 'x')
  if not kind or count not in MACHINES:
    raise errors.InputError(
        f'--topology={name}: must be CHIP:TORUS of a TPU, such as v5e:4x4 '
        '(`launch/tpu_vm.sh types` lists each TYPE\'s), or GPUxN, such as '
        'h100x8; the GPUs are '
        f'{", ".join(GPUS)}, and N is one of {", ".join(MACHINES)}')
  gpu = GPUS[kind]
  _assume_cudnn()
  with chips.refusing(name, 'GPU'):
    if importlib.util.find_spec('jax_plugins') is None:
      _load_compiler()
    description = topologies.get_topology_desc(
        platform='cuda', target_config=_spec(gpu),
        topology=f'1x{count}' if 'x' in count else f'1x1x{count}')
  chip = chip_of(gpu)
  if 'x' in count:
    chip = dataclasses.replace(chip, link_bandwidth=gpu.network)
  return chips.Slice(name, chip, list(description.devices), _OPTIONS | {
      'xla_gpu_cuda_data_dir': str(FOLDER / 'nvidia' / 'cuda_nvcc')},
                     target=_spec(gpu))


def chip_of(gpu: Gpu) -> chips.Chip:
  """Returns a GPU's data sheet in the planner's form, on one machine."""
  return chips.Chip(gpu.name, gpu.flops, USABLE * gpu.memory, gpu.bandwidth,
                    gpu.link, directions=1, latency=_LATENCY)


def _load_compiler():
  """Registers jax's GPU plugin from FOLDER.

  It is not among the other packages because every program would load it then,
  and print that there is no driver.
  """
  os.environ['JAX_SKIP_CUDA_CONSTRAINTS_CHECK'] = '1'  # of libraries to run
  jax.devices()  # else jax would load the plugin again as it starts
  sys.path.append(str(FOLDER))
  importlib.invalidate_caches()
  from jax_plugins import xla_cuda12  # not on the path before
  logging.getLogger(xla_cuda12.__name__).setLevel(logging.CRITICAL)
  with _stderr_hidden():  # the library prints that there is no driver
    xla_cuda12.initialize()
  # jax does this as it starts, for the plugins that it knows then.
  for callback in xla_bridge._plugin_callbacks:
    callback(c_api=xla_bridge._backend_factories['cuda'].c_api)


@contextlib.contextmanager
def _stderr_hidden():
  kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
    os.close(nowhere)


def _spec(gpu):
  major, minor = gpu.capability
  return _SPEC.format(**dataclasses.asdict(gpu), optin=gpu.shared - 1024,
                      major=major, minor=minor, dnn=_CUDNN)


def _assume_cudnn():
  """Lets jax trace cuDNN's attention on a machine without cuDNN."""
  try:
    fused_attention_stablehlo.check_cudnn_version()
  except RuntimeError:
    version = 10_000 * _CUDNN[0] + 100 * _CUDNN[1] + _CUDNN[2]
    fused_attention_stablehlo.check_cudnn_version = lambda: version
