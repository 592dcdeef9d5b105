"""Waiting for communication, against times worked out by hand."""

import dataclasses

import pytest

from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import timeline
from tepo_jax.tools.plan.timeline import Loop
from tepo_jax.tools.plan.timeline import Send
from tepo_jax.tools.plan.timeline import Wait
from tepo_jax.tools.plan.timeline import Work

# One FLOP, two bytes of memory and one byte of a ring per second.
CHIP = chips.Chip('', flops=1, hbm_bytes=0, hbm_bandwidth=2, link_bandwidth=1)
TORUS = chips.Slice('', CHIP, [])
SWITCH = chips.Slice('', dataclasses.replace(CHIP, directions=1), [])


def _gather(size, name='', fused=False):
  return Send('all-gather', size, name, fused)


def _permute(size, name, direction):
  return Send('collective-permute', size, name, direction=direction)


@pytest.mark.parametrize('events, work, waits', [
    # Work takes the larger of two times.
    ([Work(3, 2), Work(1, 8)], 3 + 4, 0),
    # Nothing hides a transfer that one instruction starts and ends.
    ([Work(3, 0), _gather(5), Work(3, 0)], 6, 5),
    # What runs between start and end hides it, as far as it is long enough.
    ([_gather(5, 'a'), Work(3, 0), Wait('a')], 3, 2),
    ([_gather(5, 'a'), Work(3, 0), Work(4, 0), Wait('a')], 7, 0),
    # A fused one proceeds only in the instructions that carry it.
    ([_gather(5, 'a', fused=True), Work(3, 0), Work(4, 0, ('a',)), Wait('a')],
     7, 1),
    # Two need the same links; the older one is first.
    ([_gather(5, 'a'), _gather(2, 'b'), Work(6, 0), Wait('a'), Wait('b')], 6,
     1),
    ([_gather(5, 'a'), _gather(2, 'b'), Wait('b'), Wait('a')], 0, 7),
    # Two of one name end together.
    ([_gather(5, 'a'), _gather(2, 'a'), Work(4, 0), Wait('a')], 4, 3),
    # The end of something that sends nothing, such as a copy.
    ([Work(1, 0), Wait('copy')], 1, 0),
    ([Loop(10, (_gather(5, 'a'), Work(3, 0), Wait('a')))], 30, 20),
    # The wait is in the next iteration, behind other work that may be short.
    ([Loop(10, (Wait('a'), Work(3, 0), _gather(5, 'a')))], 30, 50),
    ([_gather(9, 'a'), Loop(2, (Work(3, 0),)), Wait('a')], 6, 3)])
def test_waits(events, work, waits):
  assert timeline.seconds(events, TORUS) == (work, waits)


def test_every_collective_takes_the_latency():
  slow = dataclasses.replace(
      TORUS, chip=dataclasses.replace(CHIP, latency=2))
  assert timeline.seconds([_gather(5), _gather(5)], slow) == (0, 14)
  assert timeline.seconds(
      [_gather(5, 'a'), Work(6, 0), Wait('a')], slow) == (6, 1)


def test_opposite_directions_of_a_ring_do_not_share_links():
  def around(*directions):
    names = [str(i) for i in range(len(directions))]
    return [*map(_permute, [4] * len(names), names, directions),
            Work(5, 0), *map(Wait, names)]

  # One way, a transfer has half of the ring's bandwidth.
  assert timeline.seconds(around(1), TORUS) == (5, 8 - 5)
  assert timeline.seconds(around(1, -1), TORUS) == (5, 8 - 5)
  assert timeline.seconds(around(1, 1), TORUS) == (5, 16 - 5)
  # Behind a switch there is no direction.
  assert timeline.seconds(around(1), SWITCH) == (5, 0)
  assert timeline.seconds(around(1, -1), SWITCH) == (5, 8 - 5)
