"""What other libraries are given is the workload, and they do it alike."""

import importlib.util

import numpy as np
import pytest

from configs import benchmark
from tepo_jax import errors
from tepo_jax.measure import peers
from tepo_jax.measure import updating
from tepo_jax.measure import workload as workload_lib

_NORM = 1e-3  # less than the gradient's, so that it is clipped


def _config():
  c = benchmark.get_config('tiny')
  c.benchmark.vocabulary = 64
  c.benchmark.prompt_tokens = 4
  c.rollout.max_tokens = 12
  c.benchmark.mean_tokens = 5
  c.pretrain.update(d_model=8, num_layers=1, num_heads=2, num_kv_heads=1,
                    head_dim=4, d_ff=16)
  c.optimizer.max_grad_norm = _NORM
  return c


@pytest.fixture(name='trl_peer', scope='module')
def _trl_peer():
  pytest.importorskip('trl')
  from tepo_jax.measure import trl_peer
  return trl_peer


@pytest.fixture(name='case', scope='module')
def _case(trl_peer):
  """TRL and torch with the same weights, and their batch of many lengths."""
  config = _config()
  workload = workload_lib.of(config)
  batch = updating.random_batch(workload)
  trl = trl_peer.TrlUpdate(workload, batch, config.optimizer)
  torch = peers.TorchUpdate(workload, batch, config.optimizer)
  torch.model.load_state_dict(trl.model.state_dict())
  return workload, batch, trl, torch


@pytest.mark.skipif(importlib.util.find_spec('trl') is not None,
                    reason='TRL is installed')
def test_without_trl_it_is_refused():
  with pytest.raises(errors.InputError, match='pip install trl==1.16.0'):
    peers.require('transformers', 'trl')


def test_trl_scores_what_torch_scores(case):
  _, batch, trl, torch = case
  real_BT = batch.mask_BT > 0
  assert 0 < real_BT.mean() < 1
  np.testing.assert_allclose(
      trl.score().numpy()[real_BT], torch.score().numpy()[real_BT], atol=1e-5)


def test_trl_updates_as_torch_does(case):
  """The loss, and the clipped gradient, which the optimiser leaves."""
  *_, trl, torch = case
  assert trl.update() == pytest.approx(torch.update(), abs=1e-6)
  others = dict(torch.model.named_parameters())
  squares = 0
  for name, parameter in trl.model.named_parameters():
    want = others[name].grad.numpy()
    np.testing.assert_allclose(
        parameter.grad.numpy(), want, rtol=0, atol=1e-4 * np.abs(want).max(),
        err_msg=name)
    squares += np.square(want).sum()
  assert squares ** .5 == pytest.approx(_NORM, rel=1e-3)


def test_trl_steps_on_the_workloads_prompts(case):
  """Every sample of a prompt, T tokens each, by a cache; the weights move."""
  workload, batch, trl, _ = case
  widths = []
  hook = trl.model.get_input_embeddings().register_forward_hook(
      lambda module, inputs, output: widths.append(inputs[0].shape[1]))
  rows = trl.trainer._generate_and_score_completions(trl.prompts)
  hook.remove()
  assert widths == [4] + 11 * [1]
  np.testing.assert_array_equal(
      rows['prompt_ids'].numpy(),
      np.repeat(batch.token_BS[::workload.samples, :workload.prompt_tokens],
                workload.samples, 0))
  assert rows['completion_mask'].shape == batch.mask_BT.shape
  assert rows['completion_mask'].all()
  weight = trl.model.lm_head.weight
  before = weight.detach().clone()
  assert np.isfinite(trl.step())
  assert (weight != before).any()


def test_trl_takes_no_group_of_one(trl_peer):
  config = _config()
  config.rollout.samples = 1
  workload = workload_lib.of(config)
  with pytest.raises(errors.InputError, match='rollout.samples'):
    trl_peer.TrlUpdate(
        workload, updating.random_batch(workload), config.optimizer)
