"""Rows for the planner, measured on the CPU as if it were a planned chip."""

import pytest

from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.tools.benchmark import calibration
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import published


@pytest.mark.long
def test_rows_of_ones_own(monkeypatch):
  monkeypatch.setitem(chips.CHIPS, 'mine', chips.Chip(
      'cpu', 1e12, 1e9, 1e11, 1e10, directions=1))
  config = cli.load_config('configs/tiny.py:grpo')
  config.update_from_flattened_dict({
      'pretrain.num_layers': 1, 'pretrain.vocabulary': 64,
      'rollout.prompts': 4, 'rollout.samples': 2, 'rollout.max_tokens': 8,
      'train.minibatch_prompts': 4, 'rollout.chunk': 4})
  rows = list(calibration.measure(config))
  assert [row.phase for row in rows] == ['score', 'update', 'decode']
  for row in rows:
    assert row.chip == 'mine' and row.count == 4
    assert 0 < row.efficiency < 1
    known = vars(published).copy()
    again = eval(published.source_of(row), known)  # pylint: disable=eval-used
    assert again.efficiency == pytest.approx(row.efficiency, rel=1e-3)
    assert (again.phase, again.rows, again.model.d_ff) == (
        row.phase, row.rows, row.model.d_ff)


def test_a_device_without_a_data_sheet_is_refused():
  with pytest.raises(errors.RunError, match='no data sheet of cpu'):
    next(calibration.measure(cli.load_config('configs/tiny.py:tepo')))
