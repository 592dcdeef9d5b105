"""Efficiencies recomputed from the published measurements."""

import dataclasses
import math

import pytest

from tepo_jax.tools.plan import published

# Factors of the worst held-out predictions, as stated in PLANS.md.
WORST, WORST_OF_A_CHIP = 1.11, 1.46
# Rows of your own, which `selftest --measure` prints, may be in ROWS too.
PUBLISHED = tuple(row for row in published.ROWS if not row.is_own)


def _rows(phase, chip):
  return [row for row in PUBLISHED
          if (row.phase, row.chip) == (phase, chip)]


def test_the_roofline_of_an_update_by_hand():
  """Llama-3.1-8B on v6e-8: 3 rows of 8,192 tokens a chip. The feed-forward
  products into the hidden layer, and attention, are computed again."""
  row = _rows('update', 'v6e')[0]
  attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
  layers = 32 * (attention + 3 * 4096 * 14336)
  again = 32 * 2 * 4096 * 14336
  tokens = 3 * 8192
  pairs = 3 * 10 * 2048 ** 2  # of 16 blocks, 10 are at or below the diagonal
  flops = (6 * (layers + 4096 * 128256) * tokens + 2 * again * tokens
           + 2 * (2 + 2 + 5) * 32 * 4096 * pairs)
  assert row.roofline == pytest.approx(flops / 918e12)
  assert row.efficiency == pytest.approx(flops / 918e12 / 3.443)


def test_the_roofline_of_a_decode_step_by_hand():
  """Llama-3.3-70B on v6e-8, 64 requests of 1,500 tokens: weights, cache, and
  two sums a layer around a ring of eight."""
  row = _rows('decode', 'v6e')[0]
  weights = 2 * (80 * (2 * 8192 ** 2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
                 + 8192 * 128256)
  cache = 64 * 1500 * 80 * 8 * 128 * 2 * 2
  sums = 160 * (5e-6 + 2 * 7 / 8 * 64 * 8192 * 2 / 180e9)
  assert row.roofline == pytest.approx((weights + cache) / 8 / 1640e9 + sums)


def test_maxtext_counts_attention_without_the_mask():
  """Its log line for Llama-3.1-8B has tokens and FLOP/s: 57.9 GFLOP a token."""
  row = published._by_rate('v5p', 1, '', published._LLAMA3_8B, 1, 1e12, '',
                           'nothing')
  counted = row.seconds * 1e12 / 2048
  longer = 12 * 32 * 4096 * (8192 - 2048)  # attention over longer rows
  assert counted + longer == pytest.approx(419.485e12 / 7243.378, rel=1e-3)


@pytest.mark.parametrize('phase, chip', sorted({
    (row.phase, row.chip) for row in PUBLISHED}))
def test_efficiencies_are_those_of_the_rows(phase, chip):
  """A compiled program's roofline is up to 1.3 times that by formula."""
  rows = _rows(phase, chip)
  most = 0.83 if phase == 'decode' else 0.9
  shares = [row.roofline / row.seconds for row in rows]
  highest = [min(most, share * (1 if row.compiled else 1.3))
             for row, share in zip(rows, shares)]
  found = published.efficiency(phase, chip, PUBLISHED)
  assert found.mid == pytest.approx(
      math.prod(shares + highest) ** (0.5 / len(shares)))
  assert found.low <= min(shares) and max(highest) <= found.high <= most
  assert found.low <= found.mid / published.LEAST_RANGE
  assert all(0.2 < share < 1 for share in shares)
  assert found.of.startswith(f'{len(shares)} measurement')
  assert ' of ' not in found.of


@pytest.mark.parametrize('phase, chip, whose', [
    ('score', 'v6e', 'update on v6e'), ('decode', 'h100', 'decode on v6e'),
    ('decode', 'v5e', 'decode on v6e'), ('update', 'l40s', 'update on h100')])
def test_a_cell_without_rows_says_whose_it_borrows(phase, chip, whose):
  found = published.efficiency(phase, chip, PUBLISHED)
  assert found.of.endswith(f'of {whose}')
  owner_phase, owner_chip = whose.split(' on ')
  owner = published.efficiency(owner_phase, owner_chip, PUBLISHED)
  assert found.mid == owner.mid
  assert (found.low < owner.low) == (chip != owner_chip)


@pytest.mark.parametrize('chip', ['h100', 'v6e'])
def test_rows_of_ones_own_are_used_alone(chip):
  """Whether others measured the phase on this chip or not; other chips borrow
  from all rows."""
  own = dataclasses.replace(_rows('decode', 'v6e')[0], chip=chip,
                            compiled=0.02, seconds=0.04, source='jax 0.10.2')
  rows = (*PUBLISHED, own)
  found = published.efficiency('decode', chip, rows)
  assert found.mid == pytest.approx(0.5)
  assert found.of == '1 measurement of your own'
  assert (found.low, found.high) == pytest.approx((0.5 / 1.55, 0.5 * 1.55))
  borrowed = published.efficiency('decode', 'v5e', rows)
  count = sum(row.chip == 'v6e' and row.phase == 'decode' for row in rows)
  assert borrowed.of == f'{count} measurements of decode on v6e'


def test_the_table_has_rows_that_nothing_predicts(monkeypatch):
  own = dataclasses.replace(_rows('update', 'v6e')[0], phase='score',
                            source='jax 0.10.2', name='mine')
  monkeypatch.setattr(published, 'ROWS', (*PUBLISHED, own))
  text = published.text()
  assert '| score, mine | v6e x 8 |' in text and '(jax' not in text
  assert all(f'[{row.name}]({row.source})' in text for row in PUBLISHED)


@pytest.mark.parametrize('by_chip, stated, least', [
    (False, WORST, published.LEAST_RANGE),
    (True, WORST_OF_A_CHIP, published.BORROWED_RANGE)])
def test_the_worst_held_out_prediction_is_stated(by_chip, stated, least):
  worst = max(max(wrong, 1 / wrong)
              for _, wrong in published.held_out(by_chip, PUBLISHED))
  assert worst == pytest.approx(stated, abs=0.005) and worst < least
