"""Which flags of a report go together."""

import pytest

from tepo_jax import errors
from tepo_jax import report
from tepo_jax.runtime import disk

_AUDIT = {'audit': True}


@pytest.mark.parametrize('given, said', [
    (_AUDIT | {'csv': True}, '--audit and --csv'),
    (_AUDIT | {'latex': True}, '--audit and --latex'),
    (_AUDIT | {'runs': ['a']}, '--audit and --runs'),
    (_AUDIT | {'compare': ['a', 'b']}, '--audit and --compare'),
    (_AUDIT | {'commands': True}, '--audit and --commands'),
    (_AUDIT | {'table': '3'}, '--table and --audit'),
    ({'table': '3', 'compare': ['a', 'b']}, '--table and --compare'),
    ({'table': '3', 'replay': 1}, '--table and --replay'),
    ({'map': 'm', 'latex': True}, '--map and --latex'),
    ({'compare': ['a', 'b'], 'runs': ['a']}, '--compare and --runs'),
    ({'csv': True, 'runs': ['a'], 'inspect': 1}, '--csv and --inspect'),
    ({'csv': True, 'runs': ['a'], 'latex': True}, '--csv and --latex')])
def test_flags_that_would_be_ignored_are_refused(set_flags, given, said):
  set_flags(**given)
  with pytest.raises(errors.InputError, match=f'{said} exclude each other'):
    report.main()


def test_commands_are_those_of_a_table(set_flags, tmp_path, capsys):
  set_flags(commands=True, runs=[str(tmp_path)], out='x')
  with pytest.raises(errors.InputError, match='--commands needs --table'):
    report.main()
  set_flags(table='3', out=None)
  report.main()
  assert 'tepo_jax.train --config=configs/table3.py' in capsys.readouterr().out


def test_a_full_disk_below_a_table_is_named(set_flags):
  set_flags(audit=True, out='/dev/full')
  with pytest.raises(OSError) as error:
    report.main()
  said = disk.failure(error.value)
  assert said.startswith('/dev/full: No space left on device (')
  assert said.endswith(' MB free)')


def test_a_table_shows_no_controls_of_names(set_flags, capsys, monkeypatch):
  set_flags(csv=True, runs=['a'])
  monkeypatch.setattr(report.runs_lib, 'read', list)
  monkeypatch.setattr(report.runs_lib, 'group', list)
  monkeypatch.setattr(
      report.overview, 'comparison', lambda *_: '\x1b[31mrun,1\n')
  report.main()
  assert capsys.readouterr().out.rstrip() == r'\x1b[31mrun,1'


def test_the_map_shows_no_controls_of_names(
    set_flags, capsys, monkeypatch, tmp_path):
  set_flags(map=str(tmp_path / 'map.jsonl.gz'), out=str(tmp_path))
  for name, found in (('update', []), ('table', '\x1b[31mrun'),
                      ('draw', None)):
    monkeypatch.setattr(
        report.regimes, name, lambda *_, found=found: found)
  report.main()
  assert capsys.readouterr().out == '\\x1b[31mrun\n'


def test_the_audit_is_written_to_a_file(set_flags, tmp_path):
  set_flags(audit=True, out=str(tmp_path / 'audit.md'))
  report.main()
  assert (tmp_path / 'audit.md').read_text('utf-8').startswith('#')
