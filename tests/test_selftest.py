"""The self-test on the CPU, and whether it notices what is broken."""

import pytest

from tepo_jax import errors
from tepo_jax import selftest
from tepo_jax.policy import attention


def test_a_broken_attention_is_named(monkeypatch):
  """Here one that in bfloat16 sees 64 tokens at most."""
  config = selftest.small_config()
  assert 'xla is within 0.' in selftest.compare_attention(config)
  attend = attention.attend_xla

  def broken(q_BSNH, *arguments, block):
    *arguments, window, segment_BS = arguments
    return attend(q_BSNH, *arguments,
                  64 if q_BSNH.dtype == 'bfloat16' else window, segment_BS,
                  block=block)

  monkeypatch.setattr(attention, 'attend_xla', broken)
  with pytest.raises(errors.RunError, match='xla differs from xla by .*%: set'):
    selftest.compare_attention(config)


def test_another_device_than_wanted_is_named():
  with pytest.raises(errors.RunError, match='no gpu; jax found 4 x cpu'):
    selftest.find_devices('gpu')


@pytest.mark.long
@pytest.mark.usefixtures('compilation_folder')
def test_every_check_is_reported_and_failures_stop_none(capsys, monkeypatch):
  def broken(*_, **__):
    raise RuntimeError('CUDNN_STATUS_EXECUTION_FAILED\nmore')

  monkeypatch.setattr(selftest, 'compare_attention', broken)
  assert selftest.run_checks() == ['attention']
  lines = capsys.readouterr().out.splitlines()
  assert [line.split()[0] for line in lines] == [
      'device', 'memory', 'attention', 'rollout', 'update', 'save']
  assert 'FAILED: RuntimeError: CUDNN_STATUS_EXECUTION_FAILED' in lines[2]
  assert '64 completions' in lines[3] and ' MB' in lines[5]
