"""What all processes of a job must have in common, for `agreement.check`, and a
run with what its checkpoints were made with."""

from collections.abc import Iterable, Mapping, Sequence
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
from typing import Any

import ml_collections

from configs import fields as fields_lib
from tepo_jax import errors
from tepo_jax.job import evaluation
from tepo_jax.job import prompt_sets
from tepo_jax.job import provenance
from tepo_jax.job import texts as texts_lib
from tepo_jax.policy.huggingface import hub
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.runtime import files

# Fields that may name other folders on other hosts.
_LOCAL = ('model', 'compute.cache')
_PACKAGES = ('jax', 'jaxlib', 'libtpu', 'flax', 'optax', 'numpy',
             'transformers', 'tokenizers', 'math-verify', 'sympy')
_ENVIRONMENT = (
    'XLA_FLAGS', 'LIBTPU_INIT_ARGS', 'JAX_ENABLE_X64', 'JAX_DEFAULT_PRNG_IMPL',
    'JAX_DEFAULT_MATMUL_PRECISION', 'JAX_THREEFRY_PARTITIONABLE',
    'JAX_DISABLE_MOST_OPTIMIZATIONS')
_ROOT = pathlib.Path(__file__).parents[2]
_BLOCKS, _BLOCK_BYTES = 64, 4096  # of a file with weights


def of_start(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """What a process is started with: config, code, versions, XLA's flags."""
  return {
      **{f'config.{name}': value
         for name, value in fields_lib.flat(config).items()
         if name not in _LOCAL},
      'the text of data.template': prompt_sets.template(config).user,
      'the texts of the templates of data.sets': [
          template.user for template in prompt_sets.training_templates(config)],
      'the files of tepo_jax and configs': {
          str(path.relative_to(_ROOT)): provenance.file_digest(path)
          for package in ('tepo_jax', 'configs')
          for path in sorted((_ROOT / package).rglob('*.py'))},
      'the files of config.reward.functions': [
          provenance.file_digest(pathlib.Path(
              importlib.util.find_spec(module).origin))
          for module, colon, _ in (
              name.partition(':') for name in config.reward.functions)
          if colon],
      **{f'the version of {name}': _version(name) for name in _PACKAGES},
      **{f'the variable {name}': os.environ.get(name)
         for name in _ENVIRONMENT}}


def of_model(folder: str | os.PathLike) -> dict[str, Any]:
  """The model's small files, and blocks of those with weights, or what a
  bucket says of them; {} for a folder that has yet to be made."""
  folder = files.path(folder)
  if not folder.is_dir():
    return {}
  if files.is_remote(folder):
    sums = files.checksums(folder)
    small = {name: sums[name] for name in sorted(sums)
             if name in hub.TOKENIZER_FILES}
    weights = {name: sums[name] for name in sorted(sums)
               if name.endswith('.safetensors')}
  else:
    small = provenance.file_digests(str(folder))
    weights = {path.name: _sampled_digest(path)
               for path in sorted(folder.glob('*.safetensors'))}
  return {'the model\'s configuration and tokenizer': small,
          'the model\'s weights': weights}


def data_sets(training: Mapping[str, Sequence[groups_lib.Prompt]],
              evaluations: Iterable[evaluation.Evaluation]
              ) -> dict[str, Sequence[groups_lib.Prompt]]:
  """The prompts of both by a name for messages; training: by set."""
  return {f'the data set {name} of training': prompts
          for name, prompts in training.items()} | {
              f'the data set {item.name}': item.prompts
              for item in evaluations}


def of_prompts(sets: Mapping[str, Iterable[groups_lib.Prompt]]
               ) -> dict[str, Any]:
  """The problems, reference answers and tokens of data sets, in their order."""
  return {name: _digest((prompt.problem, prompt.token_ids)
                        for prompt in prompts)
          for name, prompts in sets.items()}


def of_data(config: ml_collections.ConfigDict, mixture: groups_lib.Mixture,
            evaluations: Iterable[evaluation.Evaluation],
            texts: Iterable[texts_lib.Text]) -> dict[str, dict[str, str]]:
  """As 'data', what the prompts, verdicts and texts of a run are made from, for
  its checkpoints. The prompts' tokens follow from it and the model folder. The
  files of reward functions may change: one that failed has to be mended."""
  return {'data': {
      'the text of a template': _digest(template.user for template in (
          prompt_sets.template(config),
          *prompt_sets.training_templates(config))),
      **{name: _digest(prompt.problem for prompt in prompts)
         for name, prompts in data_sets(mixture.sets, evaluations).items()},
      **{name: _digest([value]) for name, value in of_texts(texts).items()}}}


def check_data(where: str, saved: Mapping[str, Any], here: Mapping[str, Any]
               ) -> None:
  """Compares `of_data` of the checkpoint `where` with that of now, where both
  have it: another version of the code may have saved other names.

  Raises:
    errors.InputError: names what has changed.
  """
  if changed := [name for name, digest in saved.get('data', {}).items()
                 if here['data'].get(name, digest) != digest]:
    raise errors.InputError(
        f'{where} was made with other data: {errors.listed(changed)} '
        f'{"has" if len(changed) == 1 else "have"} changed since then; restore '
        'what there was, or begin a new run with --from')


def of_texts(texts: Iterable[texts_lib.Text]) -> dict[str, Any]:
  """The tokens of `eval.texts`, and which of them are scored."""
  return {f'the text {text.name}': [
      (array.shape, hashlib.blake2b(
          array.tobytes(), digest_size=16).hexdigest())
      for array in (text.token_NS, text.mask_NT)] for text in texts}


def _digest(parts):
  digest = hashlib.blake2b(digest_size=16)
  for part in parts:
    digest.update(repr(part).encode(errors='surrogatepass'))
  return digest.hexdigest()


def _version(name):
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _sampled_digest(path):
  """Of the size and of blocks from the first to the last: reading all of a
  large model would take minutes."""
  size = path.stat().st_size
  digest = hashlib.blake2b(str(size).encode(), digest_size=16)
  last = max(size - _BLOCK_BYTES, 0)
  for start in sorted({last * i // (_BLOCKS - 1) for i in range(_BLOCKS)}):
    digest.update(files.read_range(path, start, _BLOCK_BYTES))
  return digest.hexdigest()
