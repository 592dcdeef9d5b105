"""What a report of several runs begins with."""

from tepo_jax.tools.report import figures
from tepo_jax.tools.report import overview
from tepo_jax.tools.report import runs
from tests.tools.report.records import record


def test_a_run_without_records_has_no_duration_and_no_part_in_a_band(make_run):
  groups = runs.group(runs.read([
      make_run('a', [record(1), record(2)]), make_run('b', [], seed=1)]))
  assert '<dt>duration</dt><dd>4s</dd>' in overview.header(groups)
  assert figures.bands(groups) == ''
