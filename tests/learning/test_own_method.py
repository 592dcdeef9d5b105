"""The recipe for a method in configs/README.md, carried out in a copy."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests import recipes

# Prints loss and gradient of the new row by a jitted program, and the errors
# of two wrong numbers.
_PROGRAM = """
import inspect, json
import jax
import numpy as np
from configs import base
from tepo_jax import errors
from tepo_jax.learning import objective

assert inspect.getfile(objective).startswith(FOLDER)
batch = {name: np.array(value) for name, value in BATCH.items()}

def refusal(**numbers):
  row = base.get_config('sapo').method.to_dict()
  row['clip'].update(numbers)
  try:
    objective.make_policy_loss(row)
  except errors.InputError as error:
    return str(error)

with jax.enable_x64(True):
  loss = objective.make_policy_loss(base.get_config('sapo').method)
  (value, metrics), gradient = jax.jit(jax.value_and_grad(
      lambda logp: loss(objective.Tokens(**(batch | dict(logp_BT=logp)))),
      has_aux=True))(batch['logp_BT'])
refused = [refusal(tau_negative=-1.0), refusal(tau=1.0)]
print(json.dumps(dict(
    value=float(value), gradient=gradient.tolist(),
    clipped=float(metrics['clip_fraction_high']),
    refused=refused)))
"""


TITLE = 'Your own method'


@pytest.fixture
def copy(tmp_path):
  """A copy of the code with the method."""
  recipes.copy(tmp_path, 'tepo_jax', 'configs')
  function, entry, row = recipes.blocks(TITLE, 'python')
  objective = tmp_path / 'tepo_jax' / 'learning' / 'objective.py'
  recipes.insert(objective, function + '\n', before='CLIPS = dict(')
  recipes.insert(objective, entry, after='CLIPS = dict(')
  recipes.insert(tmp_path / 'configs' / 'methods.py', row,
                 after="paper's tables.\"\"\"\n  return {\n")
  return tmp_path


def test_the_recipe(copy, minibatch):
  batch = minibatch('violent', 'empty_row', garbage=False)
  program = _PROGRAM.replace('FOLDER', repr(str(copy))).replace(
      'BATCH', repr({name: array.tolist() for name, array in batch.items()}))
  done = subprocess.run(
      [sys.executable, '-c', program], cwd=copy, text=True, capture_output=True,
      env=os.environ | {'PYTHONPATH': str(copy)})
  assert done.returncode == 0, done.stderr[-3000:]
  found = json.loads(done.stdout)

  logp = torch.tensor(batch['logp_BT'], requires_grad=True)
  mask = torch.tensor(batch['mask_BT'])
  a = torch.tensor(batch['advantage_BT'])
  w = torch.exp(logp - torch.tensor(batch['old_logp_BT']))
  tau = torch.where(a > 0, 1.0, 1.05)
  each = 4 / tau * torch.sigmoid(tau * (w - 1)) * a
  loss = -torch.stack([
      row[m].mean() for row, m in zip(each, mask) if m.any()]).mean()
  loss.backward()
  assert found['value'] == pytest.approx(loss.item(), abs=1e-7)
  np.testing.assert_allclose(found['gradient'], logp.grad, rtol=0, atol=1e-7)
  assert found['clipped'] == 0
  for line, start in zip(found['refused'], (
      'method.clip.tau_negative: -1.0 is not a finite number > 0',
      'method.clip.tau: no such field'), strict=True):
    assert line.startswith(start) and '\n' not in line
  lines = sum(len(block.splitlines())
              for block in recipes.blocks(TITLE, 'python'))
  assert f'in {lines} lines' in recipes.section(TITLE)
