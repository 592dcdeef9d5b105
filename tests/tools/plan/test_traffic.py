"""Program counts of a rollout follow from the table of lengths."""

import collections
import dataclasses

import numpy as np
import pytest

from tepo_jax.rollout import schedule
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.tools import streaming
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import traffic


def _rollout(slots, mean, chunk=8):
  workload = workload_lib.Workload(None, 8, 4, 5, 64, mean, 0.6, 1)
  shapes = shapes_lib.make(
      slots=slots, work=32, prompt_tokens=32, max_tokens=64, chunk=chunk,
      shards=1)
  return workload, shapes, traffic.of_rollout(workload, shapes, 1.0,
                                               streaming.batches)


@pytest.mark.parametrize('slots', [8, 32])
def test_equal_lengths_keep_every_slot_busy(slots):
  _, _, (counts, _, _) = _rollout(slots, mean=64)
  decoded = {s: n for s, n in counts.items() if s.name == 'decode'}
  assert {shape.rows for shape in decoded} == {slots}
  assert sum(decoded.values()) == 64 * 32 // slots
  inserted = sum(n for s, n in counts.items() if s.name == 'insert')
  assert inserted >= 32 // (slots // 8)


def test_ragged_lengths_shrink_the_batch():
  workload, _, (counts, syncs, _) = _rollout(32, mean=16)
  length_B = workload.lengths(32)
  decoded = {s: n for s, n in counts.items() if s.name == 'decode'}
  assert sum(decoded.values()) == length_B.max()
  slot_steps = sum(s.rows * n for s, n in decoded.items())
  assert length_B.sum() <= slot_steps < 32 * length_B.max()
  assert len({shape.rows for shape in decoded}) > 1
  assert syncs > -(-sum(decoded.values()) // 8)  # some chunks end early


def test_each_chunk_returns_to_the_host():
  """All 32 at once: 64 tokens, eight a chunk. One chunk ends where the cache of
  64 columns has to grow, and another has the rest."""
  _, _, rollout = _rollout(32, mean=64)
  assert (rollout.decode_steps, rollout.syncs) == (64, 9)


def test_steps_end_when_enough_rows_are_done():
  left = np.array([3, 9, 5, 1])
  assert traffic._steps(left, 8, 0, 1) == 8
  assert traffic._steps(left, 20, 0, 1) == 9
  assert traffic._steps(left, 20, 2, 1) == 3
  assert traffic._steps(left, 20, 4, 1) == 0
  assert traffic._steps(left, 20, 2, 4) == 4
  assert traffic._steps(left, 10, 0, 4) == 10


def test_with_pages_a_step_reads_whole_blocks_of_what_is_alive():
  """8 slots of 5 prompt tokens and 600 more. Prompts are stored once a shard,
  and completions copied a page of 8 at a time."""
  workload = workload_lib.Workload(None, 8, 4, 5, 600, 600, 0.6, 1)
  shapes = shapes_lib.make(slots=8, work=32, prompt_tokens=32, max_tokens=600,
                           chunk=8, shards=1)
  shapes = dataclasses.replace(
      shapes, columns=shapes.columns[-1:], page=8, pages=1000)
  runs, _, columns = traffic.of_rollout(workload, shapes, 1.0,
                                        streaming.batches)
  decode, = (shape for shape in runs if shape.name == 'decode')
  assert decode.rows == 8
  assert {shape.name for shape in runs} == {
      'decode', 'prefill', 'store', 'copy'}
  # By hand: blocks of 256 columns, of 5 to 604 tokens alive; a step early or
  # late at each block's end, by the middle of a chunk, and before the prompt.
  each = sum(256 * -(-(5 + n) // 256) for n in range(600))
  assert columns[decode] == pytest.approx(32 * each, rel=0.02)


def test_steps_that_carry_completions_do_not_wait_for_the_longest():
  """All tokens are drawn, in fewer steps the older they may be; and no token is
  older than it may be."""
  found = []
  for versions in 0, 1, 3:
    workload = workload_lib.Workload(None, 8, 4, 5, 256, 40, 0.6, 1)
    shapes = shapes_lib.make(
        slots=32, work=32, prompt_tokens=32, max_tokens=256, chunk=8, shards=1,
        carries=versions > 0)
    rollout, age = traffic.of_carried(
        workload, shapes, 0.6, 'refill', versions) if versions else (
            traffic.of_rollout(workload, shapes, 0.6), 0)
    found.append((rollout.decode_steps, age))
    widest = max(s.columns for s in rollout.runs if s.name == 'prefill')
    assert (widest > 32) == (versions > 0)
  (steps, _), (some, young), (few, old) = found
  assert few < some < steps and 0 < young < 1 and young < old < 3


class _FewLong(workload_lib.Workload):
  """All completions have 20 tokens, but for one in 101, which has the most."""

  def lengths(self, rows):
    return np.where(np.arange(rows) % 101, 20, self.max_tokens)


def test_steps_that_must_complete_their_groups_are_counted():
  """With 8 versions: about every ninth step decodes all long completions, and
  the first of these is the ninth. The mean of three such cycles is near that of
  ten."""
  workload = _FewLong(None, 8, 4, 32, 2000, 0, 1.0, 1)
  shapes = shapes_lib.make(
      slots=64, work=10**6, prompt_tokens=32, max_tokens=2000, chunk=8,
      shards=1, carries=True)
  rollout, age = traffic.of_carried(workload, shapes, 1.0, 'off', 8)
  counts = collections.Counter()
  programs = traffic.counting(
      known := traffic._table(workload, 99, 1.0), shapes, counts,
      collections.Counter(), [])
  ages = [age_T for age_T in streaming.carried(
      schedule.Schedule(programs, shapes), known, 8, 'off', 8, 90)]
  steps = sum(n for s, n in counts.items() if s.name == 'decode') / 90
  assert age == pytest.approx(np.concatenate(ages[9:]).mean(), rel=0.05)
  assert rollout.decode_steps == pytest.approx(steps, rel=0.05)
