"""GroupSampler with a toy schedule and a toy grader."""

import types

import numpy as np

from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import requests as requests_lib
from tepo_jax.rollout import sampler
from tepo_jax.runtime import progress as progress_lib
from tepo_jax.tasks import problem as problem_lib

LENGTHS = np.array([[3, 1], [2, 3], [1, 1]])


class _Tokenizer:

  def batch_decode(self, rows, skip_special_tokens):
    assert skip_special_tokens
    return [' '.join(str(token) for token in row) for row in rows]


class _Grader:
  """Accepts completions of one token."""

  def __init__(self):
    self.seen = []

  def grade(self, items):
    self.seen += items
    return [' ' not in text for text, _ in items], {'no_answer': 1}


def _run(weights, queue, key, stats):
  """Two samples of each prompt, which count up from its last token."""
  assert weights == 'weights' and key == 'key'
  requests = queue.take(0)
  order = [(i, j) for j in (1, 0) for i in (2, 0, 1)]
  for part in (order[:4], order[4:]):
    stats.chunks += 1
    yield [requests_lib.Completion(
        requests[i], j, requests[i].token_ids[-1] + np.arange(LENGTHS[i, j]),
        np.zeros(LENGTHS[i, j]), (i, j) != (2, 0)) for i, j in part]
  assert [r.prompt_id for r in requests] == [1, 2, 3]
  assert all(r.limits == [3, 3] for r in requests)


def test_groups_are_assembled_and_graded():
  grader = _Grader()
  prompts = [groups_lib.Prompt(problem_lib.Problem(
      id=str(i), problem='?', answers=(str(i),), source='test'), (i, 10 * i), i)
             for i in (1, 2, 3)]
  draw = sampler.GroupSampler(
      schedule=lambda: types.SimpleNamespace(run=_run), group_size=2,
      max_tokens=3, grader=grader, tokenizer=_Tokenizer(),
      timers=progress_lib.Timers())
  groups = sorted(draw.stream('weights', prompts, 'key'),
                  key=lambda group: group.prompt.cursor)
  assert [g.prompt for g in groups] == prompts
  assert [g.text_G for g in groups] == [
      ('10 11 12', '10'), ('20 21', '20 21 22'), ('30', '30')]
  assert sorted(grader.seen) == sorted([
      ('10 11 12', ('1',)), ('10', ('1',)), ('20 21', ('2',)),
      ('20 21 22', ('2',)), ('30', ('3',)), ('30', ('3',))])
  np.testing.assert_array_equal(  # the fifth is truncated
      [g.accuracy_G for g in groups], [[0, 1], [0, 0], [0, 1]])
  list(draw.stream('weights', prompts, 'key'))
  assert draw.counts == {'no_answer': 4} and draw.stats.chunks == 4
  assert set(draw.timers.pop()) == {'rollout', 'grade'}
