"""Bad configs are refused in a line that names the field."""

import contextlib
import types

import numpy as np
import pytest

from configs import base
from configs import fields as fields_lib
from configs import methods
from configs import tiny
from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.job import configuration
from tepo_jax.learning import behaviour
from tepo_jax.learning import objective
from tepo_jax.learning import optimizer
from tepo_jax.learning import packing
from tepo_jax.policy import attention
from tepo_jax.policy import lora
from tepo_jax.policy import remat
from tepo_jax.rollout import dump
from tepo_jax.rollout import selection

NAN = float('nan')

# Field, bad value, and text that the line contains besides the field.
BAD = [
    ('steps', 0, 'positive'),
    ('seed', -1, '0 or more'),
    ('seed', 2**32, 'less than 2^32'),
    ('data.name', '', 'a set or a file'),
    ('data.name', 'gsm8k', 'the benchmark openai/gsm8k:main@test'),
    ('data.name', 'math500', 'the benchmark HuggingFaceH4/MATH-500@test'),
    ('data.sets', ('a', 3), 'tuples of a set'),
    ('data.sets', (('a', 0),), 'at least 1'),
    ('data.sets', (('a', 0.5),), 'integer weight'),
    ('data.sets', (('a', True),), 'integer weight'),
    ('data.sets', (('a', 1, ''),), 'perhaps a template'),
    ('data.sets', (('a', 1), ('a', 2, 'plain')), 'no set twice'),
    ('data.sets', (('a', 1), ('gsm8k', 1)), 'the benchmark openai/gsm8k'),
    ('data.skip_bad', -1, '0 or more'),
    ('published.after', 50.2, 'in [0, 1]'),
    ('published.before', -0.1, 'in [0, 1]'),
    ('eval.sets', ('a', 1), 'names of sets'),
    ('eval.sets', ('a', 'b', 'a'), 'none twice'),
    ('eval.sets', ('a', ''), 'names of sets'),
    ('reward.functions', (1,), 'at least one function'),
    ('reward.functions', (['a'],), 'at least one function'),
    ('reward.weights', ('a',), 'finite number'),
    ('reward.weights', (10**400,), 'finite number'),
    ('reward.weights', (NAN,), 'finite number'),
    ('grading.timeout', 1, 'from 2 to 3600'),
    ('grading.timeout', 3601, 'from 2 to 3600'),
    ('data.max_prompt_tokens', 0, 'positive'),
    ('data.limit', 0, 'positive'),
    ('rollout.prompts', -32, 'positive'),
    ('rollout.samples', 1, 'at least 2'),
    ('rollout.max_tokens', 0, 'positive'),
    ('rollout.temperature', 0.0, 'positive'),
    ('rollout.temperature', NAN, 'positive'),
    ('rollout.stop', ('',), 'not empty'), ('rollout.stop', (3,), 'texts'),
    ('rollout.stop_ids', (-1,), 'token ids'),
    ('rollout.stop_ids', ('a',), 'token ids'),
    ('rollout.dynamic_sampling', 'refil', 'refill, drop, off'),
    ('rollout.max_generation_batches', 0, 'from 1 to 10000'),
    ('rollout.max_generation_batches', 10**10, 'from 1 to 10000'),
    ('rollout.slots', 0, 'positive'), ('rollout.tensor', 0, 'positive'),
    ('rollout.chunk', 0, 'positive'),
    ('rollout.cache', 'page', 'one of rectangle, pages'),
    ('rollout.carry.max_versions', -1, 'from 0 to 100'),
    ('rollout.overlong_buffer', -1, '0 or more'),
    ('rollout.overlong_factor', -0.5, '0 or more'),
    ('rollout.mixed', 'rewards', 'one of verdicts, reward'),
    ('rollout.max_left_out', -1, '0 or more'),
    ('rollout.truncated', 'drop', 'one of count, mask, exclude'),
    ('rollout.logp_gap_limit', 0.0, 'positive'),
    ('grading.workers', 0, 'positive'),
    ('train.minibatch_prompts', 0, 'positive'),
    ('train.epochs', 0, 'positive'),
    ('train.packing', 'segment', 'segments, shared'),
    ('train.shared_prefix', -1, '0 or more'),
    ('train.microbatch_tokens', 0, 'positive'),
    ('train.chunk_size', 0, 'positive'),
    ('train.behaviour.weight', 'tokens', 'off, token, sequence'),
    ('train.behaviour.cap', 0.9, 'at least 1'),
    ('train.behaviour.cap', NAN, 'at least 1'),
    ('train.behaviour.reject_below', 1.1, '[0, 1]'),
    ('train.behaviour.reject_above', 0.9, 'at least 1'),
    ('optimizer.learning_rate', 0.0, 'positive'),
    ('optimizer.learning_rate', NAN, 'positive'),
    ('optimizer.schedule', 'sine', 'constant, linear, cosine'),
    ('optimizer.warmup_steps', -1, '0 or more'),
    ('optimizer.schedule_steps', 0, 'positive'),
    ('optimizer.floor', 1.5, '[0, 1]'),
    ('optimizer.beta1', 1.0, '[0, 1)'),
    ('optimizer.beta2', -0.1, '[0, 1)'),
    ('optimizer.epsilon', 0.0, 'positive'),
    ('optimizer.weight_decay', -0.1, '0 or more'),
    ('optimizer.max_grad_norm', 0.0, 'positive'),
    ('compute.dtype', 'float16', 'float32, bfloat16'),
    ('optimizer.momentum_dtype', 'float16', 'float32, bfloat16'),
    ('compute.remat', 'some', 'auto, none, dots, mlp, full'),
    ('compute.heartbeat', 0, 'from 1 to 86400'),
    ('compute.attention', 'flash', 'auto, xla, cudnn, splash'),
    ('eval.texts', ('',), 'names'),
    ('eval.texts', ('a.txt', 'a.txt'), 'none twice'),
    ('lora.rank', -1, '0 or more'),
    ('lora.alpha', 0.0, 'positive'),
    ('lora.targets', ('q',), 'q_proj, k_proj'),
    ('lora.targets', (), 'q_proj, k_proj'),
    ('lora.targets', ([],), 'q_proj, k_proj'),
    ('eval.period', -1, '0 or more'),
    ('eval.limit', 0, 'positive'),
    ('eval.samples', 0, 'positive'),
    ('eval.temperature', -1.0, '0 (greedy)'),
    ('eval.max_tokens', 0, 'positive'),
    ('eval.top_k', -1, '0 or more'),
    ('eval.top_p', 0.0, '(0, 1]'),
    ('eval.top_p', 1.5, '(0, 1]'),
    ('checkpoint.period', 0, 'positive'),
    ('checkpoint.keep', 0, 'positive'),
    ('checkpoint.keep_every', -1, '0 or more'),
    ('dump.period', -1, '0 or more'),
    ('dump.format', 'csv', 'jsonl'),
    ('pretrain.worked_steps', 0, 'positive'),
    ('pretrain.mixed_steps', -1, '0 or more'),
    ('pretrain.direct_share', 1.5, '[0, 1]'),
    ('pretrain.batch', 0, 'positive'),
    ('pretrain.demonstrations', 0, 'positive'),
    ('pretrain.learning_rate', 0.0, 'positive'),
    ('pretrain.d_model', 0, 'positive'),
    ('pretrain.num_layers', 0, 'positive'),
    ('pretrain.num_heads', 3, 'num_kv_heads=2'),
    ('pretrain.num_kv_heads', 0, 'positive'),
    ('pretrain.head_dim', -2, 'positive'),
    ('pretrain.d_ff', 0, 'positive'),
    ('pretrain.vocabulary', 0, 'positive'),
    ('checkpoint.minutes', 0.0, 'positive'),
    ('reward.timeout', 0, 'from 1 to 3600'),
    ('reward.timeout', 3601, 'from 1 to 3600'),
    ('grading.verifier', 'mine', 'one of own, math_verify'),
    ('reward.on_failure', 'ignore', 'one of stop, zero'),
    ('profile.steps', (0,), 'from 1 on'),
    ('profile.steps', ('2',), 'from 1 on'),
    # Contradictions: the line names both sides.
    ('rollout.prompts', 33, 'config.train.minibatch_prompts=8'),
    ('train.minibatch_prompts', 5, 'config.rollout.prompts=32'),
    ('rollout.overlong_buffer', 10**6, 'config.rollout.max_tokens'),
    ('rollout.weights', 'int8', 'train.behaviour.weight=token'),
    ('rollout.carry.max_versions', 1, 'train.behaviour.weight=token'),
    # The method's row.
    ('method.weight', 'tokens', 'token'),
    ('method.clip.low', -0.1, 'number'),
    ('method.reg.coef', NAN, 'finite'),
]


def _set(config, name, value):
  *sections, field = name.split('.')
  for section in sections:
    config = config[section]
  with config.ignore_type():
    config[field] = value


@pytest.mark.parametrize('name, value, said', BAD)
def test_refused(name, value, said):
  config = tiny.get_config()
  _set(config, name, value)
  with pytest.raises(errors.InputError) as caught:
    configuration.check(config, [name])
  message = str(caught.value)
  assert name in message and said in message and '\n' not in message


@pytest.mark.parametrize('settings, said', [
    (dict(), 'schedule_steps=None: must be more than optimizer.warmup_steps=0'),
    (dict(warmup_steps=9, schedule_steps=9), 'optimizer.warmup_steps=9, as op'),
    (dict(schedule_steps=39), 'steps=40: the learning rate is 0 after')])
def test_a_schedule_ends_after_its_warm_up_and_trains_to_the_end(
    settings, said):
  config = tiny.get_config()
  config.optimizer.update(settings, schedule='linear')
  with pytest.raises(errors.InputError, match=said):
    configuration.check(config, [])
  config.optimizer.update(floor=0.1, schedule_steps=39)
  configuration.check(config, ['optimizer.floor'])


def test_every_range_is_tested():
  """Every field with a range has a value in BAD; other numbers have one."""
  bad = {name for name, _, _ in BAD}
  assert not {name for name, field in configuration.FIELDS.items()
              if field.range is not fields_lib.ANY} - bad
  assert {name for name, field in configuration.FIELDS.items()
          if field.range is fields_lib.ANY and field.type in (int, float)
          } == {'mesh.data', 'mesh.fsdp', 'mesh.tensor'}  # by runtime.mesh


@pytest.mark.parametrize('name, choices', [
    ('rollout.dynamic_sampling', selection.MODES),
    ('optimizer.schedule', optimizer.SCHEDULES),
    ('train.packing', packing.MODES),
    ('train.behaviour.weight', behaviour.WEIGHTS),
    ('compute.remat', ('auto', *remat.POLICIES)),
    ('compute.attention', attention.CHOICES),
    ('dump.format', dump.FORMATS)])
def test_choices_are_those_of_the_code(name, choices):
  assert configuration.FIELDS[name].range.words == (
      f'one of {", ".join(choices)}')


def test_ranges_are_those_of_the_code():
  assert configuration.FIELDS['lora.targets'].range.words == (
      f'a non-empty subset of {", ".join(lora.TARGETS)}')
  assert configuration.FIELDS['grading.timeout'].range.words == (
      f'from {grading.MIN_TIMEOUT_S} to 3600')


def test_defaults_are_in_their_ranges():
  for field in configuration.FIELDS.values():
    assert field.is_optional or field.range.test(field.default)


def test_conditions_name_fields_and_allow_what_they_should():
  for name, field in configuration.FIELDS.items():
    for switch, value in filter(None, (field.unless, field.only_if)):
      other = configuration.FIELDS[switch]
      assert switch != name and other.range.test(value)


def test_help_has_every_field():
  text = configuration.help_text()
  for name, field in configuration.FIELDS.items():
    assert f'\n  {name}=' in text and field.meaning
  assert 'rollout.samples=8: ★ G, the group size' in text


def test_a_model_is_needed():
  config = base.get_config()
  with pytest.raises(errors.InputError, match='config.model'):
    configuration.check(config, [])
  config.model = 'somewhere'
  configuration.check(config, ['model'])


# Settings, an overridden field without effect, and the reason.
INERT = [
    ({}, 'lora.alpha', 'config.lora.rank is 0'),
    ({}, 'train.behaviour.cap', 'config.train.behaviour.weight is off'),
    ({}, 'train.shared_prefix', 'config.train.packing is not shared'),
    ({}, 'reward.timeout', "config.reward.functions is ('accuracy',)"),
    ({}, 'reward.on_failure', "config.reward.functions is ('accuracy',)"),
    ({}, 'optimizer.floor', 'config.optimizer.schedule is constant'),
    ({}, 'optimizer.schedule_steps', 'config.optimizer.schedule is constant'),
    ({}, 'method_name', '--config'),
    ({}, 'pretrain.vocabulary', 'tepo_jax.benchmark'),
    ({'model': 'somewhere'}, 'pretrain.d_model', 'config.model'),
    ({}, 'data.columns.problem', 'named sets'),
    ({'data.name': 'gsm8k:a.csv'}, 'data.columns.answer', 'named sets'),
    ({'model': 'somewhere', 'data.sets': (('a.csv', 1),)}, 'data.name',
     'config.data.sets'),
    ({'eval.period': 0}, 'eval.samples', 'config.eval.period'),
    ({'dump.period': 0}, 'dump.format', 'config.dump.period'),
    ({}, 'rollout.overlong_factor', 'config.rollout.overlong_buffer'),
    ({'rollout.dynamic_sampling': 'drop'}, 'rollout.max_generation_batches',
     'config.rollout.dynamic_sampling'),
    ({'rollout.dynamic_sampling': 'off'}, 'rollout.max_generation_batches',
     'config.rollout.dynamic_sampling'),
    ({'method.reg.region': 'none'}, 'method.reg.coef',
     'config.method.reg.region'),
    ({'method.reg.region': 'none'}, 'method.reg.penalty',
     'config.method.reg.region'),
    ({'method.reg.penalty': 'none'}, 'method.reg.region',
     'config.method.reg.penalty'),
    ({'method.reg.coef': 0.0}, 'method.reg.penalty', 'config.method.reg.coef'),
    ({'method.reg.coef': 0.0}, 'method.reg.region', 'config.method.reg.coef'),
    ({}, 'method.reference.period', 'config.method.reference.coef is 0'),
    ({'method.reg.region': 'all'}, 'method.reg.entropy_tolerance',
     'region=all looks at no change of entropy'),
    ({'method.reg.region': 'all'}, 'method.reg.delta_entropy', 'region=all'),
    ({'eval.samples': 1, 'eval.temperature': 0.0}, 'eval.top_p', 'greedily'),
    ({'eval.samples': 1, 'eval.temperature': 0.0}, 'eval.greedy', 'greedily'),
    ({'model': 'x', 'eval.samples': None, 'eval.temperature': None,
      'eval.sets': ('math500',)}, 'eval.top_k', 'greedily'),
    ({'rollout.dynamic_sampling': 'off'}, 'rollout.mixed',
     'config.rollout.dynamic_sampling'),
]


@pytest.mark.parametrize('settings, name, why', INERT)
def test_override_without_effect_is_refused(settings, name, why):
  config = tiny.get_config()
  for field, value in settings.items():
    _set(config, field, value)
  configuration.check(config, settings)  # the settings alone are no error
  with pytest.raises(errors.InputError) as caught:
    configuration.check(config, [*settings, name])
  message = str(caught.value)
  assert f'config.{name} has no effect' in message and why in message


def test_override_with_effect_is_not_refused():
  config = tiny.get_config()
  config.rollout.overlong_buffer = 8
  configuration.check(config, [
      'rollout.overlong_buffer', 'rollout.overlong_factor', 'eval.samples',
      'rollout.max_generation_batches', 'method.reg.coef', 'pretrain.d_model',
      'method.reg.entropy_tolerance', 'eval.top_p', 'eval.greedy'])
  config.eval.period = 0
  configuration.check(config, ['eval.period'])


@pytest.mark.parametrize('region', objective.REGIONS)
def test_the_regions_that_look_at_no_change_of_entropy(region):
  ones_BT = np.ones((1, 2), np.float32)
  x = types.SimpleNamespace(
      mask_BT=ones_BT > 0, logp_BT=-ones_BT, advantage_BT=np.array([[1, -1]]))
  choice = objective.REGIONS[region]
  if region == 'top_covariance':
    choice = choice.bind({'fraction': 0.5})
  falling, rising = (np.asarray(choice(x, change_BT))
                     for change_BT in (-ones_BT, ones_BT))
  assert (falling == rising).all() == (
      region in ('none', *configuration.WITHOUT_ENTROPY))


@pytest.mark.parametrize('method', methods.methods(1e-3))
def test_every_method_passes(method):
  configuration.check(tiny.get_config(method), [])
  config = base.get_config(method)
  config.model = 'somewhere'
  configuration.check(config, ['model'])


@pytest.mark.parametrize('field, value', [
    ('data.name', 'a.csv'), ('data.name', 'own/set'),
    ('eval.sets', ('a.csv',))])
def test_columns_are_for_files_and_hub_ids(field, value):
  config = tiny.get_config()
  _set(config, field, value)
  configuration.check(config, [field, 'data.columns.problem'])


@pytest.mark.parametrize('config', [base.get_config(), tiny.get_config()])
def test_a_saved_config_has_its_own_sections(config):
  configuration.check_saved(config, 'config.json')
  with config.unlocked():
    del config.rollout.samples
  with pytest.raises(errors.InputError, match='rollout.samples is missing'):
    configuration.check_saved(config, 'config.json')


def test_a_published_metric_needs_its_number():
  config = tiny.get_config()
  config.published.metric = 'eval/arithmetic/avg@8'
  with pytest.raises(errors.InputError, match='set config.published.after'):
    configuration.check(config, [])


@pytest.mark.parametrize('method, settings, refused', [
    ('rloo_original', {}, True),
    ('rloo_original', {'rollout.truncated': 'exclude'}, False),
    ('rloo_original', {'method.reference.coef': 0.0}, False),
    ('rloo_original', {'method.reference.place': 'loss'}, False),
    ('reinforce_pp', {}, False)])  # has no baseline of a group
def test_a_baseline_takes_the_kl_from_every_reward_or_from_none(
    method, settings, refused):
  config = tiny.get_config(method)
  config.rollout.truncated = 'mask'
  for name, value in settings.items():
    _set(config, name, value)
  with (pytest.raises(errors.InputError, match='set config.rollout.truncated='
                      'exclude') if refused else contextlib.nullcontext()):
    configuration.check(config, [])


def test_a_shared_prefix_is_shorter_than_the_longest_prompt():
  config = tiny.get_config()
  config.train.shared_prefix = config.data.max_prompt_tokens - 1
  configuration.check(config, [])
  config.train.shared_prefix += 1
  with pytest.raises(errors.InputError, match='train.shared_prefix=.*less than '
                     'data.max_prompt_tokens'):
    configuration.check(config, [])


def test_a_step_has_its_share_of_each_set():
  """The weights in lowest terms: 3 and 1, of which 32 prompts are a multiple,
  and 2 and 1, of which they are not."""
  config = tiny.get_config()
  config.data.sets = (('a.csv', 300), ('b.csv', 100))
  config.data.name = ''  # as of smollm2.py:own
  configuration.check(config, ['data.sets', 'data.name'])
  config.data.sets = (('a.csv', 2), ('b.csv', 1))
  with pytest.raises(errors.InputError, match='=32 is not a multiple of 3'):
    configuration.check(config, [])
