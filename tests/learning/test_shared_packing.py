"""Shared prompts by a hand-made case and by properties of random ones."""

import jax
import numpy as np
import pytest

from tepo_jax.learning import packing
from tests.learning import batches
from tests.learning.batches import T


def _batch(prompts, lengths):
  """prompts: one string a completion; its tokens are 100 i + 1, 100 i + 2, …"""
  return batches.of_tokens(
      (list(map(ord, prompt)), 100 * i + 1 + np.arange(length))
      for i, (prompt, length) in enumerate(zip(prompts, lengths)))


def _pack(batch, **arguments):
  return packing.SharedPacker(**arguments)(batch)


def test_two_completions_of_a_prompt():
  """'abc' with 2 and 1 tokens, 'z' with 2, written out by hand."""
  minibatch = _pack(
      _batch(['abc', 'abc', 'z', 'q'], [2, 1, 2, 0]),  # the last is filler
      row_tokens=11, microbatch_tokens=12, attention_capacity=1.5, shards=1)
  rows, sequences = minibatch.rows, minibatch.rows.sequences
  assert rows.token_RS.shape == (4, 1, 12)  # at worst one bin a completion
  assert sequences.source_RA.shape == (4, 2, 11)
  assert minibatch.used == 1
  np.testing.assert_array_equal(minibatch.microbatch_B, [0, 0, 0, -1])
  a, b, c, z = map(ord, 'abcz')
  # 'ab' once; then c with the tokens of completion 0, c with those of 1; z.
  for name, want in {
      'token_RS': [a, b, c, 1, 2, c, 101, z, 201, 202, 0, 0],
      'position_RS': [0, 1, 2, 3, 4, 2, 3, 0, 1, 2, -1, -1],
      'scored_RS': [0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 0]}.items():
    np.testing.assert_array_equal(getattr(rows, name)[0, 0], want, name)
  np.testing.assert_array_equal(minibatch.column_B[:3], [0, 2, 3])
  for name, want in {
      'source_RA': [[0, 1, 2, 3, 4, 0, 1, 5, 6, 0, 0],
                    [7, 8, 9, 0, 0, 0, 0, 0, 0, 0, 0]],
      'position_RA': [[0, 1, 2, 3, 4, 0, 1, 2, 3, -1, -1],
                      [0, 1, 2, -1, -1, -1, -1, -1, -1, -1, -1]],
      'segment_RA': [[0, 0, 0, 0, 0, 1, 1, 1, 1, -1, -1],
                     [2, 2, 2, -1, -1, -1, -1, -1, -1, -1, -1]]}.items():
    np.testing.assert_array_equal(getattr(sequences, name)[0], want, name)
  np.testing.assert_array_equal(
      sequences.home_NS[0, 0, :10], [0, 1, 2, 3, 4, 7, 8, 11, 12, 13])
  assert packing.efficiency(minibatch) == 10 / 12


@pytest.mark.parametrize('row_tokens, microbatch_tokens, capacity, shards', [
    (11, 30, 1.0, 1), (32, 70, 1.5, 2), (500, 1, 1.0, 1), (11, 1, 2.0, 4)])
def test_attention_sees_every_sequence_once_and_whole(
    row_tokens, microbatch_tokens, capacity, shards):
  generator = np.random.default_rng(0)
  prompts = generator.choice(['a', 'ab', 'abcd', 'xyz', 'xyw'], 30)
  lengths = generator.integers(0, T + 1, 30)
  batch = _batch(prompts, lengths)
  minibatch = _pack(batch, row_tokens=row_tokens, shards=shards,
                    attention_capacity=capacity,
                    microbatch_tokens=microbatch_tokens)
  packed, whole = minibatch.rows, minibatch.rows.sequences
  columns, rows = packed.token_RS.shape[2], whole.source_RA.shape[1] // shards
  assert columns == max(row_tokens, microbatch_tokens // shards)
  assert 0 <= rows * row_tokens - capacity * columns < row_tokens
  used = minibatch.used
  assert (packed.position_RS[used:] == -1).all()
  assert (packed.position_RS[used - 1] >= 0).any()
  found = {}
  for m, row in np.ndindex(whole.source_RA.shape[:2]):
    shard = row // rows
    segment_A = whole.segment_RA[m, row]
    real_A = segment_A[segment_A >= 0]
    assert (np.diff(real_A) >= 0).all()  # so that blocks can be skipped
    for number in set(real_A):  # in the order of the scores
      here, = np.nonzero((minibatch.microbatch_B == m) & (lengths > 0)
                         & (minibatch.row_B == shard))
      i = here[np.argsort(minibatch.column_B[here])][number]
      assert i not in found
      at, = np.nonzero(segment_A == number)
      source = whole.source_RA[m, row, at]
      found[i] = m, shard, source, number
      np.testing.assert_array_equal(
          packed.token_RS[m, shard, source],
          batch.token_BS[i, batch.position_BS[i] >= 0])
      np.testing.assert_array_equal(
          packed.position_RS[m, shard, source], np.arange(len(at)))
      np.testing.assert_array_equal(
          whole.position_RA[m, row, at], np.arange(len(at)))
  assert set(found) == set(np.flatnonzero(lengths))
  for i, (m, shard, source, number) in found.items():
    home = whole.home_NS[m, shard, source]
    sources = whole.source_RA[m].reshape(shards, -1)[shard]
    np.testing.assert_array_equal(sources[home], source)
    # The layers take a scored column's output from this very sequence.
    np.testing.assert_array_equal(
        whole.segment_RA[m].reshape(shards, -1)[shard, home[-lengths[i] - 1:]],
        number)
    scored, = np.nonzero(packed.scored_RS[m, shard])
    start = minibatch.column_B[i]
    assert (minibatch.microbatch_B[i], minibatch.row_B[i]) == (m, shard)
    np.testing.assert_array_equal(
        scored[start:start + lengths[i]], source[-lengths[i] - 1:-1])


def test_shapes_do_not_depend_on_the_lengths():
  shapes = {
      tuple(x.shape for x in jax.tree.leaves(_pack(
          _batch(['ab'] * 9, [n] * 9), row_tokens=22, microbatch_tokens=44,
          attention_capacity=1.0, shards=1)))
      for n in (0, 1, 4, 7)}
  assert len(shapes) == 1


def test_a_microbatch_is_not_larger_than_the_minibatch():
  minibatch = _pack(_batch(['ab'] * 6, [3] * 6), row_tokens=11, shards=2,
                    attention_capacity=1.0, microbatch_tokens=10**6)
  assert minibatch.rows.token_RS.shape == (1, 2, 33)
  assert minibatch.used == 1


def test_a_group_stays_together_where_it_can():
  """Three groups of three, one a bin: each prompt is computed once."""
  minibatch = _pack(
      _batch([p * 4 for p in 'xyzxyzxyz'], [5] * 9), row_tokens=11,
      microbatch_tokens=21, attention_capacity=1.5, shards=1)
  np.testing.assert_array_equal(
      minibatch.microbatch_B, [0, 1, 2, 0, 1, 2, 0, 1, 2])
  assert packing.efficiency(minibatch) == 1.0


def test_a_sequence_that_does_not_fit_is_an_error():
  with pytest.raises(ValueError, match='9 tokens does not fit into rows of 8'):
    _pack(_batch(['ab'], [7]), row_tokens=8, microbatch_tokens=8,
          attention_capacity=1.0, shards=1)


def test_prompts_that_begin_alike_share_these_columns():
  """'ab' of three prompts once; written out by hand."""
  rows = _pack(
      _batch(['abcq', 'abdr', 'abs', 'z'], [1, 1, 1, 1]), row_tokens=11,
      microbatch_tokens=14, attention_capacity=1.5, shards=1).rows
  a, b, c, d, q, r, s, z = map(ord, 'abcdqrsz')
  np.testing.assert_array_equal(
      rows.token_RS[0, 0], [a, b, c, q, 1, d, r, 101, s, 201, z, 301, 0, 0])
  np.testing.assert_array_equal(
      rows.position_RS[0, 0], [0, 1, 2, 3, 4, 2, 3, 4, 2, 3, 0, 1, -1, -1])
  np.testing.assert_array_equal(rows.sequences.source_RA[0], [
      [0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 0], [0, 1, 8, 9, 10, 11, 0, 0, 0, 0, 0]])
  # Each column's output is that in the sequence that brought it.
  np.testing.assert_array_equal(
      rows.sequences.home_NS[0, 0, :12],
      [0, 1, 2, 3, 4, 7, 8, 9, 13, 14, 15, 16])


@pytest.mark.parametrize('prefix', [0, 2])
@pytest.mark.parametrize('groups', [1, 2, 3])
def test_attention_has_capacity_for_whole_groups_of_the_greatest_lengths(
    groups, prefix):
  """A microbatch of exactly their columns holds them, and no smaller one."""
  columns = prefix + groups * (3 - prefix + 5 * (T + 1))
  batch = _batch(['a' * prefix + p * (4 - prefix) for p in 'xyz'[:groups]
                  for _ in range(5)], 5 * groups * [T])
  for tokens, used in (columns, 1), (columns - 1, 2):
    pack = packing.make('shared', prompt_tokens=4, max_tokens=T, samples=5,
                        microbatch_tokens=tokens, shards=1,
                        shared_prefix=prefix)
    assert pack.rows(5 * groups) == 5 * groups  # of 4 + T columns
    assert pack.rows(5 * groups - 2) == 5 * groups - 2  # no more are needed
    assert pack(batch).used == used
