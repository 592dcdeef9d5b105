"""Names of other libraries suggest the field that means the same here."""

import collections
import pathlib
import re

import pytest

from configs import fields as fields_lib
from configs import tiny
from tepo_jax import cli
from tepo_jax.job import suggestions

KNOWN = fields_lib.flat(tiny.get_config())


@pytest.mark.parametrize('name, field', [
    ('group_size', 'rollout.samples'),
    ('rollout.group_size', 'rollout.samples'),
    ('n', 'rollout.samples'), ('num_generations', 'rollout.samples'),
    ('actor_rollout_ref.rollout.n', 'rollout.samples'),
    ('n_samples_per_prompt', 'rollout.samples'),
    ('val_kwargs.n', 'eval.samples'),
    ('train_batch_size', 'rollout.prompts'),
    ('data.train_batch_size', 'rollout.prompts'),
    ('rollout_batch_size', 'rollout.prompts'),
    ('ppo_epochs', 'train.epochs'), ('num_iterations', 'train.epochs'),
    ('ppo_mini_batch_size', 'train.minibatch_prompts'),
    ('train.mini_batch_size', 'train.minibatch_prompts'),
    ('micro_batch_size', 'train.microbatch_tokens'),
    ('ppo_micro_batch_size_per_gpu', 'train.microbatch_tokens'),
    ('per_device_train_batch_size', 'train.microbatch_tokens'),
    ('lr', 'optimizer.learning_rate'),
    ('actor.optim.lr', 'optimizer.learning_rate'),
    ('max_response_length', 'rollout.max_tokens'),
    ('max_new_tokens', 'rollout.max_tokens'),
    ('max_completion_length', 'rollout.max_tokens'),
    ('data.max_prompt_length', 'data.max_prompt_tokens'),
    ('kl_coef', 'method.reference.coef'),
    ('kl_loss_coef', 'method.reference.coef'),
    ('clip_ratio_high', 'method.clip.high'),
    ('importance_sampling_level', 'method.weight'),
    ('num_train_epochs', 'steps'), ('max_steps', 'steps'),
    ('save_freq', 'checkpoint.period'), ('test_freq', 'eval.period'),
    ('grad_clip', 'optimizer.max_grad_norm'), ('lora_r', 'lora.rank'),
    ('tensor_model_parallel_size', 'mesh.tensor'),
    ('gradient_checkpointing', 'compute.remat')])
def test_the_field_that_means_the_same(name, field):
  assert cli._field_hint(name, KNOWN) == f'; did you mean --config.{field}?'


@pytest.mark.parametrize('name, why', [
    ('rollout.top_p', 'training samples without truncation'),
    ('lr_warmup_ratio', 'the warm-up is a number of rollout steps, '
     'optimizer.warmup_steps'),
    ('critic.lr', 'there is no critic'),
    ('algorithm.entropy_coeff', 'an entropy bonus of C is method.reg.penalty='),
    ('ref.log_prob', 'the reference policy is the one')])
def test_what_is_not_here(name, why):
  assert cli._field_hint(name, KNOWN).startswith(f'; {why}')


def test_the_table_names_fields_and_no_name_is_a_field():
  assert suggestions.NAMES.keys() <= KNOWN.keys()
  names = [name for table in (suggestions.NAMES, suggestions.ABSENT)
           for value in table.values() for name in value.split()]
  assert not set(names) & KNOWN.keys()
  twice = [n for n, count in collections.Counter(names).items() if count > 1]
  assert set(twice) == {'epsilon', 'beta'}  # of Adam, and of the paper


def _moving():
  """The rows of the README's table: ([names elsewhere], [fields here])."""
  text = (pathlib.Path(__file__).parents[2] / 'configs/README.md').read_text()
  table = text.partition('## Moving from another code base')[2]
  rows = re.findall(r'^\|(.*)\|(.*)\|(.*)\|(.*)\|.*\|$',
                    table.partition('\n## ')[0], re.M)[2:]
  return [([name for cell in row[:3] for name in re.findall('`(.*?)`', cell)],
           re.findall('`(.*?)`', row[3])) for row in rows]


def test_the_table_for_movers_agrees_with_the_suggestions():
  names = {name for row, _ in _moving() for name in row}
  assert names >= set(
      'actor_rollout_ref.rollout.n num_generations train_batch_size '
      'ppo_mini_batch_size ppo_epochs num_iterations max_response_length '
      'custom_reward_function reward_funcs tensor_model_parallel_size '
      'ground_truth use_kl_loss clip_ratio_high loss_agg_mode'.split())
  for row, fields in _moving():
    assert set(fields) <= KNOWN.keys()
    for name in row:
      same = suggestions.means(name, KNOWN) or [
          field for field in KNOWN if field.endswith(f'.{name}')]
      assert set(same) & set(fields) if fields else (
          suggestions.absence(name)), name
