"""What is said of an evaluation, from hand-written verdicts."""

import collections
import itertools
import json
import types

import ml_collections
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.job import evaluation
from tepo_jax.rollout import collect
from tepo_jax.rollout import draw
from tepo_jax.tasks import datasets


@pytest.mark.parametrize('samples', [1, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples):
  for correct in range(samples + 1):
    verdicts = [1] * correct + [0] * (samples - correct)
    for k in range(1, samples + 1):
      subsets = list(itertools.combinations(verdicts, k))
      want = sum(map(any, subsets)) / len(subsets)
      assert evaluation.pass_at_k(samples, correct, k) == pytest.approx(want)


def test_pass_at_k_does_not_resample():
  """verl's best@k draws with replacement and says .638 here."""
  assert evaluation.pass_at_k(32, 1, 32) == 1


def _group(number, accuracy, length, ended):
  problem = datasets.Problem(
      id=f'p{number}', problem=f'{number}?', answers=('1', '2'), source='test')
  size = len(accuracy)
  return collect.Group(
      collect.Prompt(problem, (1,), number), np.zeros((size, 9), np.int32),
      np.zeros((size, 9), np.float32), np.array(length, np.int32),
      np.array(ended), tuple(f'text {number}.{j}' for j in range(size)),
      np.array(accuracy, np.float32))


GROUPS = [_group(0, (1, 0, 0, 0), (2, 4, 9, 3), (True, True, False, True)),
          _group(1, (0, 0, 0, 0), (1, 1, 1, 9), (True, True, True, False)),
          _group(2, (1, 1, 1, 0), (5, 5, 5, 5), (True, True, True, True))]


def test_summarize():
  assert evaluation.summarize(GROUPS) == pytest.approx({
      'avg@4': 4 / 12,
      'pass@1': 4 / 12,
      'pass@2': (1 / 2 + 0 + 1) / 3,  # 3 of the 6 pairs hold the right one
      'pass@4': 2 / 3,
      'truncated': 2 / 12,
      'mean_length': 50 / 12,
      'problems': 3})


def test_summarize_one_sample():
  assert evaluation.summarize([_group(0, (1,), (3,), (True,))]) == {
      'avg@1': 1, 'pass@1': 1, 'truncated': 0, 'mean_length': 3, 'problems': 1}


def test_sample_lines_are_json():
  lines = evaluation.sample_lines('toy', GROUPS)
  assert len(lines) == 12
  assert json.loads(json.dumps(lines[2])) == {
      'set': 'toy', 'id': 'p0', 'problem': '0?', 'answers': ['1', '2'],
      'sample': 2, 'completion': 'text 0.2', 'correct': False, 'tokens': 9,
      'truncated': True}
  assert json.loads(json.dumps(lines[8]))['correct'] is True


def _prepare(**settings):
  """prepare() on a session that remembers what it was asked."""
  asked = []
  settings = dict(sets=('arithmetic',), limit=5, samples=8, temperature=1.0,
                  greedy=False, max_tokens=9, top_k=0, top_p=1.0,
                  stop_after_boxed=False) | settings
  session = types.SimpleNamespace(
      config=ml_collections.ConfigDict({'eval': settings}),
      prompts=lambda *arguments: asked.append(arguments) or ['a', 'b', 'c'],
      sampler=lambda **arguments: arguments)
  return evaluation.prepare(session), asked


def test_evaluations_are_the_configs():
  evaluations, asked = _prepare(greedy=True)
  assert asked == [('arithmetic', 'test', 5)]  # never the training split
  assert [e.name for e in evaluations] == ['arithmetic', 'arithmetic/greedy']
  assert [e.sampler for e in evaluations] == [
      dict(prompts=3, samples=8, max_tokens=9, stop_after_boxed=False,
           decoding=draw.Decoding(1.0)),
      dict(prompts=3, samples=1, max_tokens=9, stop_after_boxed=False,
           decoding=draw.Decoding(0.0))]


def test_truncation_is_of_sampled_decodings_alone():
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


@pytest.mark.parametrize('missing', ['samples', 'temperature'])
def test_a_file_needs_a_decoding(missing):
  with pytest.raises(errors.InputError, match='mine.jsonl.*eval.samples'):
    _prepare(sets=('mine.jsonl',), **{missing: None})


def test_run_asks_for_every_prompt_once():
  """And gives the summary, with what the grader counted in this run alone."""
  asked = []

  class Sampler:
    counts = collections.Counter()

    def stream(self, params, prompts, key):
      assert (params, key) == ('weights', 'key')
      asked.append(list(prompts))
      self.counts.update(no_answer=len(prompts))
      yield from (GROUPS[p] for p in reversed(prompts))

  item = evaluation.Evaluation('toy', [0, 1, 2], Sampler())
  for _ in range(2):
    groups, results = item.run('weights', 'key')
    assert groups == GROUPS
    assert results == evaluation.summarize(GROUPS) | {'no_answer': 3}
  assert asked == [[0, 1, 2]] * 2
