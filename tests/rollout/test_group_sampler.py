"""GroupSampler with toy schedules and toy graders; on two processes."""

import collections
import json
import threading
import types

import numpy as np
import pytest

from tepo_jax.data import problem as problem_lib
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import sampler
from tepo_jax.runtime import progress as progress_lib
from tests import jobs

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
    yield [groups_lib.Completion(
        requests[i], j, requests[i].token_ids[-1] + np.arange(LENGTHS[i, j]),
        np.zeros(LENGTHS[i, j]), (i, j) != (2, 0)) for i, j in part]
  assert [r.prompt_id for r in requests] == [1, 2, 3]
  assert all(r.limits == [3, 3] for r in requests)


PROMPTS = [
    groups_lib.Prompt(problem_lib.Problem(
        id=str(i), problem='?', answers=(str(i),), source='test'),
        (i, 10 * i), i)
    for i in (1, 2, 3)]


def _sampler(grader, run=_run):
  return sampler.GroupSampler(
      schedule=lambda: types.SimpleNamespace(run=run), group_size=2,
      max_tokens=3, grader=grader, tokenizer=_Tokenizer(),
      timers=progress_lib.Timers())


def _streamed(draw, **settings):
  """All groups of PROMPTS, in their order, and the sum of the counts."""
  groups, counts = [], collections.Counter()
  for some, graded in draw.stream('weights', PROMPTS, 'key', **settings):
    groups += some
    counts.update(graded)
  return sorted(groups, key=lambda group: group.prompt.prompt_id), counts


def test_groups_are_assembled_and_graded():
  grader = _Grader()
  draw = _sampler(grader)
  groups, counts = _streamed(draw)
  assert [g.prompt for g in groups] == PROMPTS
  assert [g.text_G for g in groups] == [
      ('10 11 12', '10'), ('20 21', '20 21 22'), ('30', '30')]
  assert sorted(grader.seen) == sorted(
      (text, prompt.problem.references) for prompt, texts in zip(PROMPTS, (
          ('10 11 12', '10'), ('20 21', '20 21 22'), ('30', '30')))
      for text in texts)
  np.testing.assert_array_equal(  # the fifth is truncated
      [g.accuracy_G for g in groups], [[0, 1], [0, 0], [0, 1]])
  assert counts == {'no_answer': 2} == _streamed(draw)[1]
  assert set(draw.timers.pop()) == {'rollout', 'grade'}


def test_groups_arrive_while_others_are_sampled_and_graded():
  grader, received, early = _Grader(), [], []
  first, second, arrived = (threading.Event() for _ in range(3))

  def grade(items):
    if grader.seen:
      second.set()
    assert (arrived if grader.seen else first).wait(60)
    return _Grader.grade(grader, items)

  def run(_, queue, *rest):
    for request in queue.take(0)[:2]:
      yield [groups_lib.Completion(
          request, j, np.ones(1), np.zeros(1), True) for j in (0, 1)]
    first.set()
    assert second.wait(60)  # the first is graded, the second being graded
    yield []
    early.extend(received)
    arrived.set()

  draw = _sampler(types.SimpleNamespace(grade=grade), run)
  for groups, _ in draw.stream('weights', PROMPTS, 'key'):
    received.extend(group.prompt.prompt_id for group in groups)
  assert early == [1] and received == [1, 2]


def test_a_check_stops_sampling_after_a_chunk():
  checks = []

  def check():
    checks.append(None)
    if len(checks) == 2:
      raise InterruptedError

  with pytest.raises(InterruptedError):
    _streamed(_sampler(_Grader()), check=check)
  assert len(checks) == 2


_STREAM = """
import json
import jax, numpy as np
from tepo_jax.job import sampling
from tepo_jax.policy import transformer
from tepo_jax.rollout import (
    carry, draw, groups, reward, sampler, schedule, selection)
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.runtime import mesh as mesh_lib, processes, progress
from tepo_jax.data import problem
processes.initialize()
devices = 2
model = transformer.ModelConfig(
    vocab_size=16, d_model=16, num_layers=1, num_heads=2, num_kv_heads=2,
    head_dim=8, d_ff=16, max_position=32)
mesh = mesh_lib.make({'data': 1, 'fsdp': devices, 'tensor': 1})
weights = sampling.make_decode_cast(model, mesh)(jax.jit(
    lambda: transformer.init(model, jax.random.key(0)),
    out_shardings=mesh_lib.replicated(mesh))())

class Tokenizer:
  def batch_decode(self, rows, skip_special_tokens):
    return [' '.join(map(str, row)) for row in rows]

class Grader:
  # Every fourth answer, whoever grades it.
  def grade(self, items):
    return [len(text) % 4 == 0 for text, _ in items], {'graded': len(items)}

def prompt(prompt_id):
  return groups.Prompt(problem.Problem(
      id=str(prompt_id), problem='?', answers=('1',), source='test'),
      (prompt_id % 16, 3), prompt_id)

programs = sampling.make(
    model, mesh, decoding=draw.Decoding(), eos_ids=(5, 6, 7), chunk=2)

def draws(carries=False):
  return sampler.GroupSampler(
      schedule=lambda: schedule.Schedule(programs, shapes_lib.make(
          slots=4, work=4 * 3 * 8, prompt_tokens=4, max_tokens=12,
          chunk=2, shards=devices, carries=carries)),
      group_size=3, max_tokens=12, grader=Grader(), tokenizer=Tokenizer(),
      timers=progress.Timers())

rewards = reward.RewardFunctions(
    {'accuracy': 1.0, 'brevity': 0.5}, max_tokens=12, overlong_buffer=3,
    overlong_factor=1.0, workers=1, timeout_s=60)
def found(rollout):
  return [
      rollout.cursor, rollout.grading, vars(rollout.stats),
      rollout.rewards.reward_NG.tolist(),
      [(g.prompt.prompt_id, g.text_G, g.accuracy_G.tolist())
       for g in rollout.completed]]

made = {}
for mixed in ('verdicts', 'reward'):
  made[mixed] = found(draws().select(weights, prompt, selection.Selection(
      cursor=7, wanted=4, group_size=3, mode='refill', max_batches=8,
      mixed=mixed), jax.random.key(1), rewards))
  carried, cursor = (), 7
  for step in range(1, 4):
    rollout = draws(True).select(weights, prompt, carry.Selection(
        step=step, max_versions=2, carried=carried, cursor=cursor, wanted=4,
        group_size=3, mode='refill', max_batches=8, mixed=mixed),
        jax.random.key(1), rewards)
    carried, cursor = rollout.carried, rollout.cursor
    made[f'{mixed} {step}'] = found(rollout) + [carry.to_json(carried)]
print(json.dumps(made))
"""


@pytest.mark.long
def test_two_processes_take_the_same_decisions():
  """As one process with the two devices, down to the steps and the tokens;
  also where reward functions, called by either process, choose the prompts,
  and over three steps that carry completions."""
  def run(count):
    outcomes = jobs.finish(jobs.start(
        count, ['-c', _STREAM], devices=2 // count), 300)
    assert {status for status, *_ in outcomes} == {0}, outcomes
    return [json.loads(out.splitlines()[-1]) for _, out, _ in outcomes]

  (one,), two = run(1), run(2)
  assert two == [one, one]
  cursor, counts, stats, rewards, groups = one['verdicts']
  assert counts['graded'] >= 3 * len(groups) > 3 * 4
  assert cursor > 7 + 4 and stats['steps'] > 12
  assert len({x for reward_G in rewards for x in reward_G}) > 4
  for name in 'verdicts 2', 'reward 3':
    assert sum(one[name][-1]['length']) > 0
  # Groups whose verdicts agree count as mixed where their rewards differ.
  assert 7 + 4 <= one['reward'][0] < cursor
