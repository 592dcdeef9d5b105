"""Evaluations and their metrics, from hand-written verdicts."""

import json
import types

import ml_collections
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.data import problem as problem_lib
from tepo_jax.data import prompts
from tepo_jax.job import configuration
from tepo_jax.job import evaluation
from tepo_jax.rollout import draw
from tepo_jax.rollout import groups as groups_lib


def _group(number, accuracy, length, ended):
  problem = problem_lib.Problem(
      id=f'p{number}', problem=f'{number}?', answers=('1', '2'), source='test')
  size = len(accuracy)
  return groups_lib.Group(
      groups_lib.Prompt(problem, (1,), number), np.zeros((size, 9), np.int32),
      np.zeros((size, 9), np.float32), np.array(length, np.int32),
      np.array(ended), tuple(f'text {number}.{j}' for j in range(size)),
      np.array(accuracy, np.float32))


GROUPS = [_group(0, (1, 0, 0, 0), (2, 4, 9, 3), (True, True, False, True)),
          _group(1, (0, 0, 0, 0), (1, 1, 1, 9), (True, True, True, False)),
          _group(2, (1, 1, 1, 0), (5, 5, 5, 5), (True, True, True, True))]


def test_sample_lines_are_json():
  lines = evaluation.sample_lines('toy', GROUPS)
  assert len(lines) == 12
  assert json.loads(json.dumps(lines[2])) == {
      'set': 'toy', 'id': 'p0', 'problem': '0?', 'answers': ['1', '2'],
      'sample': 2, 'completion': 'text 0.2', 'correct': False, 'tokens': 9,
      'truncated': True}
  assert json.loads(json.dumps(lines[8]))['correct'] is True


def _prepare(**settings):
  """prepare() on a session that records its calls; its three prompts begin with
  the same 32 tokens."""
  asked = []
  found = [groups_lib.Prompt(group.prompt.problem, (*range(32), 40 + n), n)
           for n, group in enumerate(GROUPS)]
  settings = dict(sets=('arithmetic',), limit=5, samples=8, temperature=1.0,
                  greedy=False, max_tokens=9, top_k=0, top_p=1.0,
                  stop_after_boxed=False) | settings
  session = types.SimpleNamespace(
      config=ml_collections.ConfigDict({'eval': settings}),
      template=prompts.get('dapo_answer'), check_positions=lambda section: None,
      too_long=dict.fromkeys(settings['sets'], 2),
      evaluation_prompts=lambda name: asked.append(name) or found,
      sampler=lambda **arguments: arguments)
  return evaluation.prepare(session), asked


@pytest.mark.parametrize('sets, names', [
    (('a/b/toy.jsonl', 'arithmetic'), ['toy', 'arithmetic']),
    (('gsm8k:a/test.jsonl', 'c/own.parquet', 'folder/v1.5'),
     ['gsm8k', 'own', 'v1.5']),
    (('a/toy.jsonl', 'b/toy.jsonl', 'c.jsonl'),
     ['a/toy.jsonl', 'b/toy.jsonl', 'c'])])
def test_local_sets_are_named_by_their_stem(sets, names):
  evaluations, asked = _prepare(sets=sets)
  assert [item.name for item in evaluations] == names
  assert asked == list(sets)


def test_evaluations_follow_the_config():
  evaluations, asked = _prepare(greedy=True)
  assert asked == ['arithmetic']
  assert [e.name for e in evaluations] == ['arithmetic', 'arithmetic/greedy']
  assert [(e.samples, e.is_first, e.style) for e in evaluations] == [
      (8, True, 'answer'), (1, False, 'answer')]
  assert [e.too_long for e in evaluations] == [2, 2]
  assert [e.sampler for e in evaluations] == [
      dict(prompts=3, samples=samples, max_tokens=9, stop_after_boxed=False,
           decoding=draw.Decoding(temperature), prefix=tuple(range(32)))
      for samples, temperature in ((8, 1.0), (1, 0.0))]


def test_only_sampled_decodings_are_truncated():
  evaluations, _ = _prepare(greedy=True, top_k=5, top_p=0.9, temperature=0.6)
  assert [e.sampler['decoding'] for e in evaluations] == [
      draw.Decoding(0.6, 5, 0.9), draw.Decoding(0.0)]


def test_a_set_has_its_own_decoding():
  evaluations, _ = _prepare(sets=('aime24', 'math500', 'aime24:a.jsonl'),
                            samples=None, temperature=None)
  assert [e.name for e in evaluations] == [
      'aime24', 'math500/greedy', 'aime24:a.jsonl']
  assert [(e.sampler['samples'], e.sampler['decoding'].temperature)
          for e in evaluations] == [(32, 0.6), (1, 0.0), (32, 0.6)]


def test_completions_that_end_before_their_answer_are_refused():
  with pytest.raises(errors.InputError, match='_after_boxed.* style answer'):
    _prepare(stop_after_boxed=True)


@pytest.mark.parametrize('sets, name, temperature', [
    (('mine.jsonl',), 'mine.jsonl', 0.0),
    (('aime24', 'math500'), 'math500', None)])
def test_equal_samples_are_refused(sets, name, temperature):
  settings = ml_collections.ConfigDict(dict(
      sets=sets, samples=8, temperature=temperature))
  with pytest.raises(errors.InputError, match=f'samples=8.*{name}.*the same'):
    configuration.check_decodings(settings)
  settings.samples = 1
  configuration.check_decodings(settings)


@pytest.mark.parametrize('missing', ['samples', 'temperature'])
def test_a_file_needs_a_decoding(missing):
  settings = ml_collections.ConfigDict(dict(
      sets=('mine.jsonl',), samples=8, temperature=1.0) | {missing: None})
  with pytest.raises(errors.InputError, match='mine.jsonl.*eval.samples'):
    configuration.check_decodings(settings)


class _Sampler:
  """Yields the groups of GROUPS in another order."""

  def __init__(self):
    self.asked = []

  def stream(self, params, prompts, key, check):
    assert (params, key) == ('weights', 'key')
    check()
    self.asked.append([p.problem.id for p in prompts])
    for p in reversed(prompts):
      yield [GROUPS[p.prompt_id]], dict(timeout=1, no_answer=3, died=0)


def _evaluation(sampler):
  return evaluation.Evaluation(
      'toy', [g.prompt for g in GROUPS], sampler, 4, True, 'boxed', 2)


def test_run_summarizes_in_the_order_of_the_prompts():
  sampler = _Sampler()
  for _ in range(2):
    groups, found = _evaluation(sampler).run('weights', 'key')
    assert groups == GROUPS
    assert found == pytest.approx({
        # Of the means of three problems, 1/27 of the draws has the least
        # three times, and 1/27 the largest.
        'low': 0, 'high': 3 / 4,
        'avg@4': 4 / 12, 'pass@1': 4 / 12, 'pass@2': (1 / 2 + 0 + 1) / 3,
        'pass@4': 2 / 3, 'maj@1': 0, 'maj@2': 0, 'maj@4': 0, 'no_answer': 1,
        'truncated': 2 / 12, 'mean_length': 50 / 12, 'problems': 3,
        'too_long': 2,
        'timeout': 3, 'died': 0})
  assert sampler.asked == 2 * [['p0', 'p1', 'p2']]


def test_only_what_is_to_do_is_sampled():
  sampler = _Sampler()
  item = _evaluation(sampler)
  assert list(item.stream('weights', 'key', item.prompts[1:2])) == [
      ([GROUPS[1]], {'timeout': 1, 'died': 0})]
  assert not list(item.stream('weights', 'key', []))
  assert sampler.asked == [['p1']]
