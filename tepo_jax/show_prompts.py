r"""Prints the prompts of a config's data sets as the model will read them.

  python -m tepo_jax.show_prompts --config=configs/tiny.py:tepo [--count=3] \
      [--config.field=value ...]

For data.name, or each set of data.sets, and for each set of eval.sets unless
eval.period is 0, it prints how many prompts there are, how many tokens they
have, what was left out and why, and the first prompts with their reference
answers. It needs the model's tokenizer, but no weights and no accelerator, and
writes no files; the --workdir of `train` is accepted and ignored.
"""

import statistics
import tempfile

from absl import flags
import ml_collections

from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.data import datasets
from tepo_jax.job import base_model
from tepo_jax.job import configuration
from tepo_jax.job import prompt_sets
from tepo_jax.policy.huggingface import hub
from tepo_jax.policy.huggingface import weights

_CONFIG = cli.DEFINE_config()
flags.DEFINE_string(
    'workdir', None, "Ignored: `train`'s.")
_COUNT = flags.DEFINE_integer(
    'count', 3, 'Prompts to print of each set.', lower_bound=0)

_STYLES = {'boxed': r'the last \boxed{}', 'answer': 'the last line "Answer: …"'}
_NAMED = 5  # rows or problems that are named for each reason


def main() -> None:
  config = _CONFIG.value
  configuration.check(config, cli.overridden())
  template = prompt_sets.template(config)
  tokenizer = _tokenizer(config)
  print(f'data.template={config.data.template}: the grader looks for '
        f'{_STYLES[template.style]}; '
        + ('the tokenizer\'s chat template formats the turns'
           if template.is_chat and tokenizer.chat_template is not None else
           'plain text, without a chat template')
        + (f'; data.template_args={template.arguments}' if template.arguments
           else ''))
  rows = _embedding_rows(config)
  for (name, weight, chosen), found in zip(
      configuration.training_sets(config.data),
      prompt_sets.training(config, tokenizer)):
    if config.data.sets:
      print(f'\n{name}: weight {weight}, template {chosen}', end='')
    _show(found, config, tokenizer, rows)
  for name in config.eval.sets if config.eval.period else ():
    _show(prompt_sets.evaluation(config, template, tokenizer, name), config,
          tokenizer, rows)


def _tokenizer(config: ml_collections.ConfigDict):
  """The tokenizer of config.model, or the embedded model's."""
  if config.model is not None:
    return weights.load_tokenizer(config.model)
  with tempfile.TemporaryDirectory() as scratch:
    return base_model.make_tokenizer(config, scratch)


def _embedding_rows(config: ml_collections.ConfigDict) -> int | None:
  """The size of the model's vocabulary, if the folder has a config.json."""
  if config.model is None:
    return None
  folder = hub.folder(config.model, hub.TOKENIZER_FILES)
  return (weights.model_config(folder).vocab_size
          if (folder / 'config.json').is_file() else None)


def _show(found: prompt_sets.PromptSet, config: ml_collections.ConfigDict,
          tokenizer, rows: int | None) -> None:
  if rows is not None:
    prompt_sets.check_vocabulary(found, tokenizer, rows, config.model)
  counts = [len(ids) for _, ids in found.short]
  print(f'\n{errors.printable(found.name)}: {found.loaded.rows} rows, '
        f'{len(counts)} prompts' + (
      f' of {min(counts)} to {max(counts)} tokens, median '
      f'{statistics.median(counts):g}' if counts else ''))
  for why, number, named in _left_out(found, config):
    more = ['…'] if len(named) < number else []
    print(errors.printable(
        f'  left out, {why}: {number}'
        + (f' ({", ".join(named + more)})' if named else '')))
  for problem, ids in found.short[:_COUNT.value]:
    print(errors.printable(
        f'--- {problem.id}: {len(ids)} tokens; reference answer: '
        f'{" or ".join(problem.answers)}\n{tokenizer.decode(ids)}'))


def _left_out(found, config):
  """Yields (reason, count, names of some rows or problems)."""
  loaded = found.loaded
  if loaded.bad:
    yield 'bad rows', len(loaded.bad), loaded.bad[:_NAMED]
  for reason, numbers in loaded.omitted.items():
    yield (datasets.LEAVE_OUT[reason], len(numbers),
           [f'row {number}' for number in numbers[:_NAMED]])
  if beyond := len(loaded.problems) - len(found.problems):
    yield 'problems beyond the limit', beyond, []
  if found.long:
    yield (f'prompts longer than '
           f'data.max_prompt_tokens={config.data.max_prompt_tokens}',
           len(found.long),
           [f'{problem.id} ({len(ids)} tokens)'
            for problem, ids in found.long[:_NAMED]])


if __name__ == '__main__':
  cli.run(main)
