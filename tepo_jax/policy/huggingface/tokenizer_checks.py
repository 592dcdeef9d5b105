"""Whether a tokenizer reads text as its folder's files say."""

import pathlib

import tokenizers
import transformers

from tepo_jax import errors
from tepo_jax.policy.huggingface import hub
from tepo_jax.policy.huggingface import tensor_files

_FILE = 'tokenizer.json'
# White space, digits, punctuation, another script: what the classes of
# transformers treat differently.
_SENTENCE = 'Let x = 12 + 345,  then\nfind "x/3"; ½ of it is не 5.\n'


def check_files(folder: pathlib.Path) -> None:
  """Names the file of a tokenizer that is not JSON, or not text.

  Raises:
    InputError: there is one.
  """
  for name in hub.TOKENIZER_FILES:
    file = folder / name
    if file.suffix == '.json' and file.is_file():
      tensor_files.read_json(file)
    if file.suffix == '.jinja' and file.is_file():
      try:
        file.read_text('utf-8')
      except UnicodeDecodeError as error:
        raise errors.InputError(f'{file}: not in UTF-8 ({error})') from error


def check(tokenizer: transformers.PreTrainedTokenizerBase,
          folder: pathlib.Path, where: str) -> None:
  """Compares a loaded tokenizer with its folder's tokenizer.json.

  transformers takes the class from the model's type and may replace the
  file's model or its pre-tokenizer by those of the class.

  Raises:
    InputError: the two tokenize a sentence differently; a sentence has no
      tokens; there is no EOS token; or no chat template is the default of
      several.
  """
  if tokenizer.eos_token_id is None:
    raise errors.InputError(f'{where}: the tokenizer has no EOS token')
  templates = tokenizer.chat_template
  if isinstance(templates, dict) and 'default' not in templates:
    raise errors.InputError(
        f'{where}: chat_template is a list without a default, of '
        f'{errors.listed(sorted(templates)) or "nothing"}; call one of them '
        'default in tokenizer_config.json')
  ours = tokenizer(_SENTENCE, add_special_tokens=False)['input_ids']
  if not (folder / _FILE).is_file():
    if not ours:  # transformers makes a tokenizer of special tokens alone
      raise errors.InputError(
          f'{where}: the tokenizer has no tokens for text: {_FILE} is missing')
    return
  alone = tokenizers.Tokenizer.from_file(str(folder / _FILE))
  alone.no_truncation()
  alone.no_padding()
  theirs = alone.encode(_SENTENCE, add_special_tokens=False).ids
  if ours != theirs:
    raise errors.InputError(
        f'{where}: {_FILE} alone tokenizes a sentence differently from '
        f'transformers\' {type(tokenizer).__name__}, which model_type or '
        'tokenizer_class selects; correct these, for instance '
        'tokenizer_class=PreTrainedTokenizerFast')


def check_eos_ids(found: object, where: str) -> list[int]:
  """The `eos_token_id` of a JSON file, an id, a list of ids or null, as a list.

  Raises:
    InputError: it is something else.
  """
  ids = found if isinstance(found, list) else [found]
  ids = [one for one in ids if one is not None]
  for one in ids:
    if type(one) is not int or one < 0:
      raise errors.InputError(
          f'{where}: eos_token_id {one!r} is not a token id')
  return ids
