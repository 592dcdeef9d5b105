"""Nats per token on fixed texts: what a policy forgets while it is trained.

A text is a .txt file, whose windows of tokens are scored without the first
token of each, or a .jsonl file, a row of which is `text`, or a `prompt` and the
`completion` that is scored after it, in the tokenizer's chat format. No
sampling is involved and no temperature: −Σ log π(y_t | y_<t) / N over the N
scored tokens.

Axes: N rows · B rows scored at once · S tokens of a row · T = S − 1.
"""

import dataclasses
from typing import Any

import numpy as np

from tepo_jax import errors
from tepo_jax.data import problem as problem_lib
from tepo_jax.data import prompts
from tepo_jax.data import sources
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import prompt_sets
from tepo_jax.job import session as session_lib
from tepo_jax.policy import rope
from tepo_jax.policy import scoring
from tepo_jax.runtime import files
from tepo_jax.runtime import mesh as mesh_lib

_WINDOW = 512  # tokens of a .txt file that are scored together
_UNIT = 32  # S is a multiple, so that few shapes are compiled


@dataclasses.dataclass(frozen=True)
class Text:
  """A text in rows, padded on the left: token_NS, position_NS; mask_NT is 1
  where the next token is scored. `score` is jitted."""
  name: str
  token_NS: np.ndarray
  position_NS: np.ndarray
  mask_NT: np.ndarray
  batch: int
  score: Any

  def nats_per_token(self, params: Any) -> float:
    """Of the complete weights `params`, in the training layout."""
    total = 0.0
    for start in range(0, len(self.token_NS), self.batch):
      part = slice(start, start + self.batch)
      logp_BT = mesh_lib.to_host(self.score(
          params, self.token_NS[part], self.position_NS[part]))
      # Elsewhere log-probabilities are undefined.
      total -= float(logp_BT.sum(
          where=self.mask_NT[part] > 0, dtype=np.float64))
    return total / float(self.mask_NT.sum())


def prepare(session: session_lib.Session) -> list[Text]:
  """The texts of `config.eval.texts`, in its order.

  Raises:
    errors.InputError: a file is missing, has another form or no token to score;
      names the file and the row.
  """
  model, config = session.model, session.config
  shards = mesh_lib.batch_shards(session.mesh)
  chunk_size = config.train.chunk_size * shards

  def score(params, token_BS, position_BS):
    return scoring.score(
        model, params, token_BS, position_BS, chunk_size=chunk_size,
        num_targets=token_BS.shape[1] - 1).logp_BT

  jitted = programs_lib.compiled(
      session.mesh, score, model.dtype,
      out_shardings=mesh_lib.replicated(session.mesh))
  texts, stems = [], [files.path(name).stem for name in config.eval.texts]
  for name, stem in zip(config.eval.texts, stems):
    rows = _rows(name, session)
    size = max(len(ids) for ids, _ in rows)
    size += -size % _UNIT
    batch = max(1, config.train.microbatch_tokens // size // shards) * shards
    texts.append(Text(stem if stems.count(stem) == 1 else name, *_padded(
        rows, size, min(batch, len(rows) + -len(rows) % shards)), jitted))
  return texts


def _padded(rows, size, batch):
  """The arrays of a Text, a multiple of `batch` rows, and `batch`."""
  count = len(rows) + -len(rows) % batch
  token_NS = np.zeros((count, size), np.int32)
  position_NS = np.full((count, size), -1, np.int32)
  mask_NT = np.zeros((count, size - 1), np.float32)
  for row, (ids, scored) in enumerate(rows):
    token_NS[row, size - len(ids):] = ids
    position_NS[row, size - len(ids):] = np.arange(len(ids))
    mask_NT[row, size - 1 - scored:] = 1
  return token_NS, position_NS, mask_NT, batch


def _rows(name, session):
  """[(token ids, how many at the end are scored)]."""
  path, tokenizer = files.path(name), session.tokenizer
  if path.suffix == '.txt' and path.exists():
    try:
      text = path.read_text('utf-8')
    except (OSError, UnicodeDecodeError) as error:
      raise errors.InputError(f'{name}: {errors.one_line(error)}') from error
    ids = tokenizer.encode(text, add_special_tokens=False)
    rows = [ids[i:i + _WINDOW] for i in range(0, len(ids), _WINDOW)]
    found = [(row, len(row) - 1) for row in rows if len(row) > 1]
  elif path.suffix == '.jsonl':
    data = session.config.data
    template = prompts.get(
        'plain', date=data.date,
        arguments=data.template_args if tokenizer.chat_template else None)
    found = [_row(f'{name}: row {number}', row, tokenizer, template)
             for number, row in sources.find(name, None, ()).rows]
    model = session.model
    most = rope.longest(model.max_position, model.rope_scaling)
    for number, (ids, _) in enumerate(found, 1):
      if len(ids) > most:
        raise errors.InputError(
            f'{name}: text {number} has {len(ids)} tokens, more than the '
            f'model\'s {most} positions')
  else:
    raise errors.InputError(f'{name}: no .txt or .jsonl file')
  if not found:
    raise errors.InputError(f'{name}: no token to score')
  for number, (ids, _) in enumerate(found, 1):
    prompt_sets.check_ids(f'text {number} of {name}', ids, tokenizer,
                          session.model.vocab_size, session.folder)
  return found


def _row(where, row, tokenizer, template):
  match row:
    case errors.InputError():
      raise row
    case {'text': str(text)}:
      ids = tokenizer.encode(text, add_special_tokens=False)
      scored = len(ids) - 1
    case {'prompt': str(prompt), 'completion': str(completion)}:
      problem = problem_lib.Problem(where, prompt, (), where)
      answer = tokenizer.encode(completion, add_special_tokens=False)
      ids = prompts.render(template, tokenizer, problem) + answer
      scored = len(answer)
    case _:
      raise errors.InputError(
          f'{where}: neither a text nor a prompt and a completion')
  if scored < 1:
    raise errors.InputError(f'{where}: no token to score')
  return ids, scored
