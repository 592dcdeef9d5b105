"""The texts of an exported folder: its model card, generation_config.json and
chat template."""

from collections.abc import Iterable, Mapping, Sequence
import json
import re
import shlex
from typing import Any

import ml_collections

from configs import fields as fields_lib
from tepo_jax import errors
from tepo_jax.data import chat_templates as chat_templates_lib
from tepo_jax.data import prompts
from tepo_jax.job import configuration
from tepo_jax.job import description
from tepo_jax.job import fork
from tepo_jax.policy.huggingface import hub
from tepo_jax.policy.huggingface import packages
from tepo_jax.policy.huggingface import tensor_files
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import files

CARD, GENERATION = 'README.md', 'generation_config.json'
UNKNOWN = 'unknown'

_FULL = """import transformers
tokenizer = transformers.AutoTokenizer.from_pretrained('FOLDER')
model = transformers.AutoModelForCausalLM.from_pretrained(
    'FOLDER', dtype='auto')"""
_ADAPTER = """import peft, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained('{base}')
base = transformers.AutoModelForCausalLM.from_pretrained(
    '{base}', dtype='auto')
model = peft.PeftModel.from_pretrained(base, 'FOLDER')"""
_SERVERS = (
    'vllm serve {folder} --dtype bfloat16\n'
    'python -m sglang.launch_server --model-path {folder} --dtype bfloat16')
_ADAPTER_SERVERS = (
    'vllm serve {base} --enable-lora --max-lora-rank {rank} '
    '--lora-modules trained={folder}\n'
    'python -m sglang.launch_server --model-path {base} '
    '--lora-paths trained={folder}')


def generation_config(folder: str, stop_ids: Iterable[int]) -> str:
  """generation_config.json of the model folder `folder`, with every id that
  ends a completion in the run; serving stops where training stopped.

  stop_ids: of the config. Its stop strings are not here: transformers refuses
  to generate with them unless it is given a tokenizer.
  """
  tokenizer = weights.load_tokenizer(folder)
  path = hub.folder(folder, hub.TOKENIZER_FILES) / GENERATION
  known = json.loads(path.read_text('utf-8')) if path.is_file() else {}
  known['eos_token_id'] = sorted(
      {*weights.eos_ids(folder, tokenizer), *stop_ids})
  if tokenizer.pad_token_id is not None:
    known.setdefault('pad_token_id', tokenizer.pad_token_id)
  return json.dumps(known, indent=2, sort_keys=True) + '\n'


def chat_templates(folder: str, arguments: str) -> dict[str, str]:
  """{file name: text} of the model folder's files with a chat template, which
  render without arguments as with these (`data.template_args`)."""
  def changed(source):
    if isinstance(source, list):  # of named templates
      return [named | {'template': changed(named['template'])}
              for named in source]
    return chat_templates_lib.with_defaults(source, arguments)

  source, texts = hub.folder(folder, hub.TOKENIZER_FILES), {}
  for name in hub.CHAT_TEMPLATES if arguments else ():
    file = source / name
    if file.suffix == '.jinja' and file.is_file():
      texts[name] = changed(file.read_text('utf-8'))
    elif file.is_file():
      raw = tensor_files.read_json(file)
      if raw.get('chat_template') is not None:
        texts[name] = json.dumps(
            raw | {'chat_template': changed(raw['chat_template'])},
            indent=2, sort_keys=True) + '\n'
  return texts


def named_base(config: ml_collections.ConfigDict) -> str | None:
  """The hub id of the model that a run started from; None: it has none."""
  if config.model is None or packages.is_named(config.model) or (
      files.path(config.model).exists()):
    return None
  return config.model


def card(config: ml_collections.ConfigDict, folder: str, step: int,
         records: Sequence[Mapping[str, Any]], is_adapter: bool,
         parent: fork.Parent | None = None) -> str:
  """The model card of what a run has trained, in Markdown.

  Args:
    config: of the run. folder: the model folder that it started from.
    step: of the checkpoint. records: of metrics.jsonl.
    is_adapter: whether only the adapters are exported.
    parent: of a run that is a fork.
  """
  base = config.model or 'the embedded model, which the run made itself'
  title = base.rstrip('/').rpartition('/')[2]
  license_ = _license(config.model, folder)
  hub_id = named_base(config)
  head = ['---', f'library_name: {"peft" if is_adapter else "transformers"}',
          f'license: {license_}',
          *([f'base_model: {hub_id}'] if hub_id else []), '---']
  load = _ADAPTER if is_adapter else _FULL
  return '\n'.join([
      *head, f'# {title}, {config.method_name}, step {step}', '',
      *_facts(config, base, license_, step, parent), '', '## Method', '',
      *_method(config), '', '## Evaluation', '', *_evaluation(records, step),
      '', '## Loading', '', 'FOLDER is this folder.', '', '```python',
      load.format(base=hub_id or folder), '```', '', '```',
      *servers(config, folder, is_adapter), '```',
      '', f'{_prompt(config)} {_sampling(config.rollout, is_adapter)}', ''])


def servers(config: ml_collections.ConfigDict, folder: str, is_adapter: bool,
            exported: str = 'FOLDER') -> list[str]:
  """The commands that serve an exported folder: vLLM's and SGLang's, both
  untried. The arguments are those of `card`."""
  return (_ADAPTER_SERVERS if is_adapter else _SERVERS).format(
      base=shlex.quote(named_base(config) or folder), rank=config.lora.rank,
      folder=shlex.quote(exported)).splitlines()


def _facts(config, base, license_, step, parent):
  about = ('unknown: the downloaded files of the base model state none'
           if license_ == UNKNOWN else license_)
  trained = (f'LoRA adapters of rank {config.lora.rank}' if config.lora.rank
             else 'all weights')
  return [
      f'- Base model: {base}', f'- License of the base model: {about}',
      f'- Trained: {trained}, by tepo_jax with reinforcement learning from '
      'verifiable rewards', f'- Data: {_data(config.data)}',
      f'- Steps: {step} of {config.steps}, each {config.rollout.prompts} '
      f'prompts × {config.rollout.samples} completions of at most '
      f'{config.rollout.max_tokens:,} tokens',
      *_forked(parent),
      f'- Learning rate: {_rate(config.optimizer)}; seed: {config.seed}']


def _forked(parent):
  if parent is None:
    return []
  moments = '' if parent.keeps_optimizer else (
      '; the moments of the optimiser began anew then')
  return [f'- Forked from the run `{files.path(parent.run).name}` after step '
          f'{parent.step}: the steps up to there had the settings of that run, '
          f'which its own config.json has{moments}']


def _rate(optimizer):
  parts = [f'{optimizer.learning_rate:g}']
  if optimizer.warmup_steps:
    parts.append(f'after {optimizer.warmup_steps} steps of warm-up')
  if optimizer.schedule != 'constant':
    parts.append(f'with the schedule {optimizer.schedule}, to '
                 f'{optimizer.floor:g} of it at step '
                 f'{optimizer.schedule_steps}')
  return ', '.join(parts)


def _data(data):
  if not data.sets:
    return data.name
  return '; '.join(
      f'{name} (weight {weight}, template `{template}`)'
      for name, weight, template in configuration.training_sets(data))


def _method(config):
  fields = fields_lib.flat(config)
  rows = [f'| {part} | {choice} | ' + text.replace('|', r'\|') + ' |'
          for part, choice, text in description.formula(fields)]
  return [f'`{config.method_name}`: {description.equation(fields)}', '',
          '| Part | Choice | Formula |', '|---|---|---|', *rows]


def _evaluation(records, step):
  """A table of the last evaluation up to the step."""
  evaluated = [record for record in records if record['step'] <= step and any(
      name.startswith('eval/') for name in record)]
  if not evaluated:
    return ['None was recorded by the run.']
  last = evaluated[-1]
  rows = ['| Set | Accuracy | 95 % interval | Problems |',
          '|---|---:|---:|---:|']
  for name, value in last.items():
    found = re.fullmatch(r'eval/(.*)/(avg@\d+)', name)
    if found is None:
      continue
    low, high, problems = (last.get(f'eval/{found[1]}/{part}')
                           for part in ('low', 'high', 'problems'))
    interval = '–' if low is None else f'{low:.1%} to {high:.1%}'
    count = '–' if problems is None else f'{problems:,.0f}'
    rows.append(
        f'| {found[1]}, {found[2]} | {value:.1%} | {interval} | {count} |')
  return [f'After step {last["step"]}, by the run itself. The intervals are '
          'bootstraps over the problems.', '', *rows]


def _prompt(config):
  names = {name for *_, name in configuration.training_sets(config.data)}
  if len(names) > 1:
    return ('The prompts of the training are those of the templates named with '
            'its data, in the chat template of the tokenizer if they are '
            'chats.')
  name, = names
  try:
    template = prompts.get(name, config.data.system)
  except errors.InputError:  # a file of the machine that trained
    return (f'The prompts of the training are those of the template `{name}`, '
            'a file that is not here.')
  system = '' if template.system is None else (
      f' with the system turn "{template.system}"')
  form = 'the chat template of the tokenizer' if template.is_chat else (
      'no chat template')
  return (f'The prompts of the training are those of the template '
          f'`{name}`{system}, in {form}.')


def _sampling(rollout, is_adapter):
  said = [f'Completions were sampled at temperature {rollout.temperature:g}.']
  if not is_adapter:
    said.append(f'`{GENERATION}` lists every token that ended a completion.')
  elif rollout.stop_ids:
    said.append(f'The tokens {", ".join(map(str, rollout.stop_ids))} ended '
                'one besides the base model\'s own; set them when you sample.')
  if rollout.stop:
    said.append(f'The texts {", ".join(map(repr, rollout.stop))} ended one '
                'too; set them when you sample.')
  return ' '.join(said)


def _license(model, folder):
  """The license that the base model's own card names, in its first lines."""
  if model is None:
    return 'apache-2.0'  # this repository's
  if packages.is_named(model):
    return packages.license_of(model)
  readme = files.path(folder) / CARD
  found = readme.is_file() and re.match(
      r'---\n(?:.*\n)*?license:\s*(\S+)', readme.read_text('utf-8', 'replace'))
  return found[1] if found else UNKNOWN
