r"""Asks a model, or two side by side, with the prompts and sampler of its run.

  python -m tepo_jax.ask --model=FOLDER_OR_WORKDIR[@STEP] "What is 12 + 35?" \
      [--samples=4] [--temperature=0] [--reference=47] [--against=MODEL]

--model is a Hugging Face folder or hub id, or the workdir of a training run:
then its last checkpoint is asked, or that of rollout step STEP, with the run's
prompt template, temperature and longest completion; a model folder given as
--against is then asked in the same way. A reference answer has the grader say
whether each completion is correct.

Without a question, each line of stdin is one. On a terminal that is a chat:
the model sees what was said before (with --samples, the first completion), as
far as it fits. It ends with Ctrl-D.
"""

from collections.abc import Iterator, Sequence
import contextlib
import copy
import dataclasses
import itertools
import math
import sys
from typing import Any

from absl import flags
import jax
import ml_collections
from rich import console as console_lib
from rich import table
from rich import text as text_lib

from configs import base
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.data import problem as problem_lib
from tepo_jax.data import prompts
from tepo_jax.data import references
from tepo_jax.job import configuration
from tepo_jax.job import prompt_sets
from tepo_jax.job import restore
from tepo_jax.job import run_folder
from tepo_jax.job import sampling as sampling_lib
from tepo_jax.job import session as session_lib
from tepo_jax.policy import rope
from tepo_jax.policy.huggingface import weights
from tepo_jax.rollout import draw
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import sampler as sampler_lib
from tepo_jax.runtime import files
from tepo_jax.runtime import mesh as mesh_lib

_MODEL = flags.DEFINE_string(
    'model', None, 'A Hugging Face folder or hub id, or WORKDIR[@STEP] of a '
    'run.', required=True)
_AGAINST = flags.DEFINE_string(
    'against', None, 'A second model, to compare with the first.')
_SAMPLES = flags.DEFINE_integer(
    'samples', 1, 'Completions of each question.', lower_bound=1)
_TEMPERATURE = flags.DEFINE_float(
    'temperature', None, 'Of sampling, 0: greedy; by default that of the run, '
    'or 1.', lower_bound=0)
_MAX_TOKENS = flags.DEFINE_integer(
    'max_tokens', None, 'Longest completion; by default that of the run, or '
    '1,024.', lower_bound=1)
_TEMPLATE = flags.DEFINE_string(
    'template', None, "Prompt template, as config.data.template; by default "
    'that of the run, or qwen_boxed.')
_REFERENCE = flags.DEFINE_string(
    'reference', None, 'Reference answer of the question.')
_SEED = flags.DEFINE_integer(
    'seed', 0, 'Of sampling.', lower_bound=0, upper_bound=2**32 - 1)

_LONGEST = 1024  # tokens of a completion, where there is no run
_CHAT = 2048  # tokens of a chat's prompt, if the run's are shorter
_SLOTS = 64  # where the devices do not say how much memory is free


@dataclasses.dataclass
class Model:
  """A model that is asked. is_run: whether it is the policy of a run. turns:
  (role, text) of the chat so far; empty without one, and for a model without a
  chat template."""
  name: str
  session: session_lib.Session
  params: Any
  is_run: bool = False
  turns: tuple[tuple[str, str], ...] = ()

  def ask(self, sampler: sampler_lib.GroupSampler, questions: Sequence[str],
          key: jax.Array) -> list[groups_lib.Group]:
    """A group of completions for each question, in their order.

    The oldest exchanges of a chat that has become too long are forgotten.

    Raises:
      errors.InputError: a prompt has more tokens than the model may read, or
        one that its embedding lacks.
    """
    most = self.session.config.data.max_prompt_tokens
    asked = []
    for number, question in enumerate(questions):
      problem, ids = self._render(f'question {number + 1}', question)
      while len(ids) > most and self.turns:
        errors.note(f'{self.name}: the chat is longer than {most} tokens; its '
                    'oldest exchange is forgotten')
        self.turns = self.turns[2:]
        problem, ids = self._render(problem.id, question)
      if len(ids) > most:
        raise errors.InputError(
            f'{problem.id} makes a prompt of {len(ids)} tokens, more than '
            f'{most}')
      prompt_sets.check_ids(
          f'the prompt of {problem.id}', ids, self.session.tokenizer,
          self.session.model.vocab_size, self.session.folder)
      asked.append(groups_lib.Prompt(problem, tuple(ids), number))
    groups = [group for some, _ in sampler.stream(self.params, asked, key)
              for group in some]
    return sorted(groups, key=lambda group: group.prompt.prompt_id)

  def _render(self, name, question):
    """The problem of a question, after the chat so far, and its token ids."""
    problem = problem_lib.Problem(
        id=name, problem=question, source='ask', answers=_references(),
        turns=self.turns)
    return problem, prompts.render(
        self.session.template, self.session.tokenizer, problem)

  def remember(self, problem: problem_lib.Problem, answer: str) -> None:
    """Adds two turns to the chat: the problem as it was put, the answer."""
    template = self.session.template
    if template.is_chat and self.session.tokenizer.chat_template:
      self.turns += (('user', prompts.user_turn(template, problem)),
                     ('assistant', answer))


def _references() -> tuple[str, ...]:
  """That of --reference, as a data set's is read; () if it is not given.

  Raises:
    errors.InputError: it is empty, or no answer can be read in it.
  """
  if _REFERENCE.value is None:
    return ()
  found = references.read(_REFERENCE.value, '--reference', may_be_text=True)
  if not found or not all(map(grading.canonical, found)):
    raise errors.InputError('--reference is empty')
  return found


def _settings(name: str, is_run: bool, like: ml_collections.ConfigDict | None
              ) -> ml_collections.ConfigDict:
  """The config for a workdir, or a folder; `like`: that of a run, with which a
  folder is compared."""
  if is_run:
    saved = run_folder.read_config(name)
    configuration.check_saved(saved, f'{name}/config.json')
    config = ml_collections.ConfigDict(saved.to_dict())
  else:
    config = copy.deepcopy(like) if like else base.get_config()
    config.model = name
  if _TEMPERATURE.value is not None:
    config.rollout.temperature = _TEMPERATURE.value
  if _TEMPLATE.value is not None:
    config.data.template = _TEMPLATE.value
  # This machine's devices, whichever trained the model.
  config.mesh.update(data=1, fsdp=-1, tensor=1)
  config.rollout.update(
      tensor=None, slots=_SLOTS if mesh_lib.free_bytes() is None else None)
  config.compute.attention = 'auto'
  config.eval.max_tokens = 1  # nothing is evaluated
  return config


def _fit_lengths(config, folder, is_run, is_chat):
  """Keeps prompt and completion within the model's positions."""
  model = weights.model_config(folder)
  positions = rope.longest(model.max_position, model.rope_scaling)
  if not is_run:
    config.data.max_prompt_tokens = min(
        config.data.max_prompt_tokens, positions // 2)
    config.rollout.max_tokens = min(
        _LONGEST, positions - config.data.max_prompt_tokens)
  if _MAX_TOKENS.value is not None:
    config.rollout.max_tokens = _MAX_TOKENS.value
  if is_chat:
    config.data.max_prompt_tokens = max(
        config.data.max_prompt_tokens,
        min(_CHAT, positions - config.rollout.max_tokens))


def open_model(spec: str, stack: contextlib.ExitStack,
               like: ml_collections.ConfigDict | None = None,
               is_chat: bool = False) -> Model:
  """Loads a model of --model or --against; the stack closes it.

  like: the config of the run at whose settings a model folder is asked.
  is_chat: whether prompts may be longer than the run's.
  """
  name, step = run_folder.split_step(spec)
  is_run = (files.path(name) / session_lib.CHECKPOINTS).exists()
  if step is not None and not is_run:
    raise errors.InputError(f'{spec}: {name} is not the workdir of a run')
  config, params = _settings(name, is_run, like), None
  if is_run:
    folder, params = restore.restore_params(
        name, mesh_lib.make(config.mesh), step)
    session_lib.cache_compilations(config)
  else:
    folder = session_lib.model_folder(config, '')
  config.lora.rank = 0  # adapters are merged
  _fit_lengths(config, folder, is_run or like is not None, is_chat)
  session = stack.enter_context(session_lib.open_folder(config, folder))
  session.check_positions('rollout')
  cast = sampling_lib.make_decode_cast(*session.decoding())
  return Model(spec, session,
               cast(session.load_params() if params is None else params),
               is_run)


def _sampler(model, count):
  """The sampler of up to `count` questions."""
  settings = model.session.config.rollout
  return model.session.sampler(
      prompts=count, samples=_SAMPLES.value, max_tokens=settings.max_tokens,
      decoding=draw.Decoding(settings.temperature))


def _show(console, question, models, answers):
  """Prints the completions of a question; of two models side by side."""
  console.print(text_lib.Text(
      f'> {errors.printable(question)}', style='bold'))
  if len(models) == 1:
    for sample in range(_SAMPLES.value):
      console.print(_completion(answers[0], sample),
                    soft_wrap=not console.is_terminal)
    return
  shown = table.Table(box=None, expand=True, padding=(0, 2, 0, 0))
  for model in models:
    shown.add_column(text_lib.Text(errors.printable(model.name)), ratio=1,
                     overflow='fold')
  for sample in range(_SAMPLES.value):
    shown.add_row(*(_completion(group, sample) for group in answers))
  console.print(shown)


def _completion(group, sample):
  """A completion, its length and its verdict."""
  tokens = int(group.length_G[sample])
  notes = [f'{tokens} tokens']
  if not group.ended_G[sample]:
    notes.append('truncated')
  if _REFERENCE.value is not None:
    notes.append('correct' if group.accuracy_G[sample] else 'wrong')
  return text_lib.Text.assemble(
      errors.printable(group.text_G[sample].strip()),
      (f'\n[{", ".join(notes)}]\n', 'dim'))


def _lines() -> Iterator[str]:
  """The questions on stdin, without blank lines."""
  if sys.stdin.isatty():
    errors.note('Each line is a question; Ctrl-D ends.')
  for line in sys.stdin:
    if line := line.strip():
      yield line


def _check(questions):
  """Refuses what can be seen to be wrong before a model is loaded."""
  if not all(map(str.strip, questions)):
    raise errors.InputError('a question is empty')
  if _REFERENCE.value is not None and len(questions) != 1:
    raise errors.InputError('--reference needs exactly one question')
  if _TEMPERATURE.value is not None and not math.isfinite(_TEMPERATURE.value):
    raise errors.InputError(
        f'--temperature={_TEMPERATURE.value}: must be finite')
  _references()


def main() -> None:
  given = cli.arguments()
  is_chat = not given and sys.stdin.isatty()
  questions = given or (() if is_chat else tuple(_lines()))
  if not is_chat and not questions:
    raise errors.InputError('no question: give one, or one a line on stdin')
  _check(questions)
  console = console_lib.Console(highlight=False)
  with contextlib.ExitStack() as stack:
    models = [open_model(_MODEL.value, stack, is_chat=is_chat)]
    if _AGAINST.value is not None:
      models.append(open_model(
          _AGAINST.value, stack, is_chat=is_chat,
          like=models[0].session.config if models[0].is_run else None))
    samplers = [_sampler(model, max(1, len(questions))) for model in models]
    key = jax.random.key(_SEED.value)
    if is_chat:
      _chat(console, models, samplers, key)
      return
    found = [model.ask(sampler, questions, key)
             for model, sampler in zip(models, samplers)]
    for question, answers in zip(questions, zip(*found)):
      _show(console, question, models, answers)


def _chat(console, models, samplers, key):
  """Asks line by line; a question that cannot be asked does not end it."""
  for number, question in zip(itertools.count(), _lines()):
    try:
      answers = [
          model.ask(sampler, [question], jax.random.fold_in(key, number))[0]
          for model, sampler in zip(models, samplers)]
    except errors.InputError as error:
      errors.note(str(error))
      continue
    _show(console, question, models, answers)
    for model, group in zip(models, answers):
      model.remember(group.prompt.problem, group.text_G[0])


if __name__ == '__main__':
  cli.run(main, takes_arguments=True)
