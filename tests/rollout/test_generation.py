"""The host's side of sampling, around a sampler and a grader that are toys."""

import jax
import numpy as np

from tepo_jax.rollout import collect
from tepo_jax.rollout import generation
from tepo_jax.rollout import sampler
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import metrics
from tepo_jax.tasks import datasets

LENGTHS = np.array([3, 1, 2, 3, 1, 1, 0, 0])  # the last group is filler


class _Tokenizer:

  def batch_decode(self, rows, skip_special_tokens):
    assert skip_special_tokens
    return [' '.join(str(token) for token in row) for row in rows]


class _Grader:
  """Right is what is one token long."""

  def __init__(self):
    self.seen = []

  def grade(self, items):
    self.seen = items
    return [' ' not in text for text, _ in items], {'no_answer': 1}


def _generate(weights, token_QP, position_QP, prompt_id_Q, key):
  """Two samples a prompt: its last token, counted on."""
  assert weights == 'weights' and key == 'key'
  start_B1 = np.repeat(np.asarray(token_QP)[:, -1:], 2, 0)
  return sampler.Completions(
      token_BT=start_B1 + np.arange(3), logp_BT=np.zeros((8, 3)),
      length_B=LENGTHS, ended_B=np.arange(8) != 4)


def test_groups_of_fewer_prompts_than_rows():
  grader = _Grader()
  prompts = [collect.Prompt(datasets.Problem(
      id=str(i), problem='?', answers=(str(i),), source='test'), (i, 10 * i), i)
             for i in (1, 2, 3)]
  draw = generation.GroupSampler(
      generate=_generate, rows=4, width=3, group_size=2, grader=grader,
      tokenizer=_Tokenizer(), timers=metrics.Timers(),
      mesh=mesh_lib.make(dict(data=2, fsdp=2, tensor=1), jax.devices()))
  groups = draw('weights', prompts, 'key')
  assert [g.prompt for g in groups] == prompts
  # Cut at their lengths; nothing of the filler row.
  assert [g.text_G for g in groups] == [
      ('10 11 12', '10'), ('20 21', '20 21 22'), ('30', '30')]
  assert grader.seen == [
      ('10 11 12', ('1',)), ('10', ('1',)), ('20 21', ('2',)),
      ('20 21 22', ('2',)), ('30', ('3',)), ('30', ('3',))]
  np.testing.assert_array_equal(  # the fifth is truncated
      [g.accuracy_G for g in groups], [[0, 1], [0, 0], [0, 1]])
  draw('weights', prompts, 'key')
  assert draw.counts == {'no_answer': 2}
  assert set(draw.timers.pop()) == {'rollout', 'grade'}
