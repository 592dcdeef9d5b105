r"""Exports the trained weights of a run as a Hugging Face folder.

  python -m tepo_jax.export --workdir=DIR [--step=N] [--dtype=bfloat16] \
      [--adapter] --out=DIR

The folder holds config.json, safetensors of at most 5 GB each, the tokenizer, a
generation_config.json with every token that ended a completion, and a model
card, for transformers' from_pretrained, vLLM and SGLang (the last two untried);
data.template_args become defaults of its chat template. --dtype rounds the fp32
weights; by default they are saved in bfloat16 if the config.json of the model
folder that the run started from names it, else in float32.
The adapters of a LoRA run are merged in; with --adapter they are written alone,
in fp32, as a folder for peft.
On several hosts (TEPO_MULTIHOST=1) each reads its part of the checkpoint, and
the first one writes, one tensor at a time.
"""

from absl import flags

from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import fork
from tepo_jax.job import model_card
from tepo_jax.job import restore
from tepo_jax.job import run_folder
from tepo_jax.policy.huggingface import adapters
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import files
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import metrics
from tepo_jax.runtime import processes

_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Workdir of a training run.', required=True)
_STEP = flags.DEFINE_integer(
    'step', None, 'Rollout step of the checkpoint; by default the last.')
_OUT = flags.DEFINE_string(
    'out', None, 'Folder to make; if it exists, it must be empty.',
    required=True)
_DTYPE = flags.DEFINE_enum(
    'dtype', None, ['float32', 'bfloat16'], "Of the weights; by default that "
    "in the config.json of the run's model folder.")
_ADAPTER = flags.DEFINE_bool(
    'adapter', False, 'Export only the adapters of a LoRA run, for peft.')


def main() -> None:
  processes.initialize()
  with processes.ending_together():
    export(files.path(_OUT.value))


def export(out: files.Path) -> None:
  """Writes the folder; all processes of a job must call it."""
  if _ADAPTER.value and _DTYPE.value == 'bfloat16':
    raise errors.InputError('--dtype: adapters are exported in float32')
  processes.on_first(run_folder.check_out, out)
  mesh = mesh_lib.make({'data': 1, 'fsdp': -1, 'tensor': 1})
  trained = restore.restore_trained(_WORKDIR.value, mesh, _STEP.value)
  workdir = files.path(_WORKDIR.value)
  folder, config = trained.folder, run_folder.read_config(workdir)
  card = model_card.card(
      config, folder, trained.step, metrics.read(workdir), _ADAPTER.value,
      fork.read(workdir))
  if _ADAPTER.value:
    if trained.base is None:
      raise errors.InputError(f'--adapter: {_WORKDIR.value} is not a LoRA run')
    adapters.save(out, trained.model.lora, trained.params,
                  model_card.named_base(config) or folder, card)
  else:
    weights.save(
        out, weights.model_config(folder), trained.complete(), source=folder,
        dtype=_DTYPE.value or weights.saved_dtype(folder), texts={
            model_card.CARD: card,
            model_card.GENERATION: model_card.generation_config(
                folder, config.rollout.stop_ids),
            **model_card.chat_templates(folder, config.data.template_args)})
  # The others wait until everything is uploaded.
  processes.on_first(print, f'exported {_WORKDIR.value} to {out}')
  if not files.is_remote(out):  # which servers do not read
    vllm, _ = model_card.servers(config, folder, _ADAPTER.value, str(out))
    processes.on_first(print, f'to serve it with vLLM (untried): {vllm}')


if __name__ == '__main__':
  cli.run(main, joins_job=True)
