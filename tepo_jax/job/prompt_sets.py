"""The prompts of a config's data sets: what is read, rendered, left out."""

from collections.abc import Sequence
import dataclasses

import ml_collections
import transformers

from tepo_jax import errors
from tepo_jax.data import datasets
from tepo_jax.data import embedded
from tepo_jax.data import problem as problem_lib
from tepo_jax.data import prompts
from tepo_jax.job import configuration
from tepo_jax.runtime import processes
from tepo_jax.runtime import sharing

# A problem with its token ids.
Rendered = tuple[problem_lib.Problem, list[int]]


@dataclasses.dataclass(frozen=True)
class PromptSet:
  """A data set as prompts.

  Attributes:
    name: as in the config. loaded: also what reading left out.
    problems: of `loaded`, up to the limit.
    short, long: prompts up to data.max_prompt_tokens, and longer ones, which
      are left out.
  """
  name: str
  loaded: datasets.Loaded
  problems: list[problem_lib.Problem]
  short: list[Rendered]
  long: list[Rendered]


def template(config: ml_collections.ConfigDict, name: str | None = None
             ) -> prompts.Template:
  """A template with the settings of `config.data`, by default the one that it
  names; raises InputError as `prompts.get`."""
  data = config.data
  return prompts.get(
      name or data.template, data.system, data.template_args, data.date)


def training_templates(config: ml_collections.ConfigDict
                       ) -> list[prompts.Template]:
  """The template of each training set, in the config's order.

  Raises:
    errors.InputError: as `prompts.get`, or one asks for answers of another
      style than `data.template`: there is one grader.
  """
  default, found = template(config), []
  for name, _, chosen in configuration.training_sets(config.data):
    found.append(template(config, chosen))
    if found[-1].style != default.style:
      raise errors.InputError(
          f'config.data.sets: {name} has the template {chosen}, of the style '
          f'{found[-1].style!r}, but config.data.template='
          f'{config.data.template} has {default.style!r}: all must ask for '
          'answers of the same style')
  return found


def training(config: ml_collections.ConfigDict,
             tokenizer: transformers.PreTrainedTokenizerBase
             ) -> list[PromptSet]:
  """The sets that `config.data` trains on; raises InputError as
  `datasets.read` and `training_templates`."""
  data = config.data
  return [
      _load(config, template, tokenizer, name, None, data.limit, data.skip_bad)
      for (name, *_), template in zip(
          configuration.training_sets(data), training_templates(config))]


def evaluation(config: ml_collections.ConfigDict, template: prompts.Template,
               tokenizer: transformers.PreTrainedTokenizerBase, name: str
               ) -> PromptSet:
  """A set of `config.eval.sets`; raises InputError as `datasets.read`."""
  split = 'test' if embedded.is_task(name) else None
  return _load(config, template, tokenizer, name, split, config.eval.limit, 0)


def check_vocabulary(
    found: PromptSet, tokenizer: transformers.PreTrainedTokenizerBase,
    rows: int, folder: str) -> None:
  """`check_ids` of a set's prompts."""
  for problem, ids in found.short:
    check_ids(f'in {found.name}, the prompt of {problem.id}', ids, tokenizer,
              rows, folder)


def check_ids(what: str, ids: Sequence[int],
              tokenizer: transformers.PreTrainedTokenizerBase, rows: int,
              folder: str) -> None:
  """Raises InputError if a text has a token that the embedding, of so many
  rows, lacks. what: the text, for the message. folder: of the model."""
  if max(ids) >= rows:
    raise errors.InputError(
        f'{folder}: the tokenizer has {len(tokenizer)} ids, but the embedding '
        f'{rows} rows; {what} has the id {max(ids)}')


def _load(config, template, tokenizer, name, split, limit, skip_bad):
  loaded = datasets.read(
      name, split, limit, skip_bad, config.data.columns, _share(name))
  problems = loaded.problems[:limit]
  with errors.naming(loaded.origin):
    short, long = prompts.render_short(
        problems, template, tokenizer, config.data.max_prompt_tokens)
  return PromptSet(name, loaded, problems, short, long)


def _share(name):
  """How a job's processes get a set of the hub, which only the first asks; None
  if one of them has it as a file. All of them must call this."""
  if not processes.is_job() or processes.any_of(not datasets.is_on_hub(name)):
    return None
  return sharing.folder_of_first
