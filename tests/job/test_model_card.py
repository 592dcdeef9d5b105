"""The model card of an export, and the stop ids of generation_config.json."""

import json

import jinja2
import pytest

from configs import base
from configs import tiny
from tepo_jax.data import embedded
from tepo_jax.job import fork
from tepo_jax.job import model_card

RECORDS = [
    {'step': 4, 'eval/gsm8k/avg@8': 0.5, 'eval/gsm8k/low': 0.45,
     'eval/gsm8k/high': 0.55, 'eval/gsm8k/problems': 1319},
    {'step': 5, 'reward': 1.0},
    {'step': 8, 'eval/gsm8k/avg@8': 0.9, 'eval/gsm8k/low': 0.85,
     'eval/gsm8k/high': 0.95, 'eval/gsm8k/problems': 1319}]


def _config(model):
  config = base.get_config('tepo')
  config.model = model
  return config


def test_the_card_says_what_was_trained_and_how_to_load_it(tmp_path):
  (tmp_path / 'README.md').write_text(
      '---\nlanguage: en\nlicense: mit\n---\n# Base\n')
  card = model_card.card(
      _config('owner/base'), str(tmp_path), 5, RECORDS, False)
  assert card.startswith('---\nlibrary_name: transformers\nlicense: mit\n'
                         'base_model: owner/base\n---\n')
  for line in (
      '- License of the base model: mit', '- Data: dapo_math',
      '- Steps: 5 of 80, each 64 prompts × 8 completions of at most 8,192 '
      'tokens',
      '| clip | ppo (low=0.2, high=0.28) | S = min(w A, C(w) A), C = clip(., '
      '1 - low, 1 + high). |',
      '| reg.penalty | kl_full (coef=0.001) | KL(policy \\|\\| old) over the '
      'whole vocabulary: TEPO, Eq. 4. |',
      'After step 4, by the run itself. The intervals are bootstraps over the '
      'problems.',
      '| gsm8k, avg@8 | 50.0% | 45.0% to 55.0% | 1,319 |',
      'vllm serve FOLDER --dtype bfloat16'):
    assert line in card.splitlines()
  assert '90.0%' not in card  # of a later step


def test_the_commands_that_serve_an_export(tmp_path):
  config = _config('owner/base')
  config.lora.rank = 16
  assert model_card.servers(config, str(tmp_path), True, 'a b') == [
      'vllm serve owner/base --enable-lora --max-lora-rank 16 --lora-modules '
      "trained='a b'",
      'python -m sglang.launch_server --model-path owner/base --lora-paths '
      "trained='a b'"]


@pytest.mark.parametrize('name, in_loss, row', [
    ('grpo_original', ' + beta K_it',
     '| k3 (coef=0.04, place=loss, period=0) | e^-d + d - 1, never negative. |'
     ), ('rloo_original', '',
         '| k1 (coef=0.03, place=reward, period=0) | d. |')])
def test_the_card_has_the_kl_to_a_reference_policy(
    tmp_path, name, in_loss, row):
  config = base.get_config(name)
  config.model = 'owner/base'
  lines = model_card.card(config, str(tmp_path), 5, [], False).splitlines()
  assert (f'`{name}`: L = sum_it c_it (coef M_it R_it - b_it S(w_it, A_it)'
          f'{in_loss})') in lines
  assert f'| reference.estimator {row}' in lines


def test_a_license_that_the_base_does_not_state_is_unknown(tmp_path):
  card = model_card.card(_config(str(tmp_path)), str(tmp_path), 5, [], True)
  assert ('- License of the base model: unknown: the downloaded '
          'files of the base model state none') in card
  assert 'license: unknown\n---' in card and 'base_model:' not in card
  assert 'None was recorded by the run.' in card
  assert f"AutoTokenizer.from_pretrained('{tmp_path}')" in card
  own = model_card.card(tiny.get_config('grpo'), str(tmp_path), 5, [], False)
  assert 'license: apache-2.0\n' in own


@pytest.mark.parametrize('changed', [
    {}, {'data.template': 'of_the_trainer.jinja'},
    {'data.sets': (('a', 1, 'plain'), ('b', 1, 'sums'))}],
                         ids=['one', 'a missing file', 'several'])
@pytest.mark.parametrize('is_adapter, tokens', [
    (False, '`generation_config.json` lists every token that ended a '
     'completion.'),
    (True, "The tokens 7, 8 ended one besides the base model's own; set them "
     'when you sample.')])
def test_the_card_says_how_completions_were_sampled(
    tmp_path, changed, is_adapter, tokens):
  config = _config('owner/base')
  config.rollout.update(temperature=0.7, stop=('END',), stop_ids=(7, 8))
  config.update_from_flattened_dict(changed)
  card = model_card.card(config, str(tmp_path), 5, [], is_adapter)
  assert card.splitlines()[-1].endswith(
      f' Completions were sampled at temperature 0.7. {tokens} The texts '
      "'END' ended one too; set them when you sample.")


def test_the_card_of_a_fork_names_its_parent_and_the_schedule(tmp_path):
  config = _config('owner/base')
  config.optimizer.update(schedule='cosine', schedule_steps=60, floor=0.1,
                          warmup_steps=4)
  lines = model_card.card(
      config, str(tmp_path), 50, [], False,
      fork.Parent('/somewhere/old', 20, False, '')).splitlines()
  assert ('- Forked from the run `old` after step 20: the steps up to there '
          'had the settings of that run, which its own config.json has; the '
          'moments of the optimiser began anew then') in lines
  assert ('- Learning rate: 5e-07, after 4 steps of warm-up, with the schedule '
          'cosine, to 0.1 of it at step 60; seed: 0') in lines


def test_serving_stops_at_every_token_that_ends_a_completion(tmp_path):
  embedded.build_tokenizer('arithmetic', tmp_path)
  (tmp_path / 'generation_config.json').write_text(
      '{"eos_token_id": 7, "top_p": 0.8}')
  (tmp_path / 'config.json').write_text('{"eos_token_id": [3]}')
  saved = json.loads(model_card.generation_config(str(tmp_path), (4,)))
  assert saved['top_p'] == 0.8
  assert {3, 4, 7} < set(saved['eos_token_id'])  # and the tokenizer's


@pytest.mark.parametrize('name, content, found', [
    ('chat_template.jinja', '{{ think }}', lambda text: text),
    ('tokenizer_config.json', json.dumps({'chat_template': [
        {'name': 'default', 'template': '{{ think }}'}], 'eos_token': 'x'}),
     lambda text: json.loads(text)['chat_template'][0]['template'])])
def test_arguments_become_defaults_of_the_chat_template(
    tmp_path, name, content, found):
  (tmp_path / name).write_text(content)
  texts = model_card.chat_templates(str(tmp_path), 'think=7')
  assert texts.keys() == {name}
  template = jinja2.Template(found(texts[name]))
  assert template.render().strip() == '7'
  assert template.render(think=1).strip() == '1'
  assert not model_card.chat_templates(str(tmp_path), '')
