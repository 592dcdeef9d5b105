"""Other libraries get our workload and compute the same."""

import dataclasses
import importlib.util
import sys

import jax
import numpy as np
import optax
import pytest

from configs import benchmark
from tepo_jax import errors
from tepo_jax.policy.huggingface import weights
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.benchmark import registry
from tepo_jax.tools.benchmark import updating

_NORM = 1e-3  # less than the gradient's, so that it is clipped


def _config():
  c = benchmark.get_config('tiny')
  c.data.max_prompt_tokens = 4
  c.rollout.max_tokens = 12
  c.pretrain.update(d_model=8, num_layers=1, num_heads=2, num_kv_heads=1,
                    head_dim=4, d_ff=16, vocabulary=64)
  c.optimizer.max_grad_norm = _NORM
  return c


@pytest.fixture(name='trl_peer', scope='module')
def _trl_peer():
  pytest.importorskip('trl')
  from tepo_jax.tools.benchmark import trl_peer
  return trl_peer


@pytest.fixture(name='case', scope='module')
def _case(trl_peer):
  """TRL and torch with the same weights, and a batch of different lengths."""
  config = _config()
  workload = workload_lib.of(config, mean_tokens=5)
  batch = workload.random_batch()
  trl = trl_peer.TrlUpdate(workload, batch, config.optimizer)
  from tepo_jax.tools.benchmark import torch_peer
  torch = torch_peer.TorchUpdate(workload, batch, config.optimizer)
  torch.model.load_state_dict(trl.model.state_dict())
  return workload, batch, trl, torch


@pytest.mark.skipif(importlib.util.find_spec('trl') is not None,
                    reason='TRL is installed')
def test_without_trl_it_is_refused():
  with pytest.raises(errors.InputError, match='pip install torch trl==1.16.0'):
    registry.load(['transformers', 'trl'])


def test_trl_scores_what_torch_scores(case):
  _, batch, trl, torch = case
  real_BT = batch.mask_BT > 0
  assert 0 < real_BT.mean() < 1
  np.testing.assert_allclose(
      trl.score().numpy()[real_BT], torch.score().numpy()[real_BT], atol=1e-5)


def test_trl_updates_as_torch_does(case):
  """Compares the loss and the clipped gradient, which TRL keeps."""
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
  """All samples have T tokens, decoded with a cache; the weights change."""
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


def test_trl_refuses_groups_of_one(trl_peer):
  _refuses_groups_of_one(trl_peer.TrlUpdate)


@pytest.fixture(name='tunix_peer', scope='module')
def _tunix_peer():
  pytest.importorskip('tunix')
  from tepo_jax.tools.benchmark import tunix_peer
  return tunix_peer


@pytest.fixture(name='with_ours', scope='module')
def _with_ours(tunix_peer, tmp_path_factory):
  """Tunix and our case with the same weights, through Tunix's loader."""
  from flax import nnx
  from tunix.models.qwen3 import params as tunix_params
  config = _config()
  config.method.aggregate = 'seq_mean_token_mean'  # Tunix's default
  workload = workload_lib.of(config, mean_tokens=5)
  workload = dataclasses.replace(workload, model=dataclasses.replace(
      workload.model, rope_theta=1e6))  # the only value in Tunix
  batch = workload.random_batch()
  tunix = tunix_peer.TunixUpdate(workload, batch, config.optimizer)
  made = jax.tree.leaves(nnx.state(tunix.trainer.model))
  assert all(np.any(leaf) for leaf in made)
  mesh = made[0].sharding.mesh
  ours = updating.case(config, workload, 'padded')

  def to_tunix(tree):
    folder = tmp_path_factory.mktemp('weights') / 'model'
    weights.save(folder, workload.model, tree)
    return nnx.state(tunix_params.create_model_from_safe_tensors(
        str(folder), tunix.trainer.model.config, mesh))

  nnx.update(tunix.trainer.model, to_tunix(ours.state.params))
  return workload, batch, tunix, ours, to_tunix


@pytest.mark.skipif(importlib.util.find_spec('tunix') is not None,
                    reason='Tunix is installed')
def test_without_tunix_it_is_refused():
  with pytest.raises(errors.InputError, match='--no-deps google-tunix==0.1.7'):
    registry.load(['tunix'])


def test_the_installed_tunix_meets_the_requirements(tunix_peer):
  del tunix_peer
  registry.load(['tunix'])


def test_tunix_scores_what_we_score(with_ours):
  _, batch, tunix, ours, _ = with_ours
  real_BT = batch.mask_BT > 0
  np.testing.assert_allclose(
      np.array(tunix.score())[real_BT], np.array(ours.score()[0])[real_BT],
      atol=1e-5)


def test_tunix_updates_as_we_do(with_ours):
  """Compares the loss and the clipped gradient, ten times Adam's mean."""
  *_, tunix, ours, to_tunix = with_ours
  assert tunix.update() == pytest.approx(float(ours.update()), abs=1e-6)
  found = jax.tree.leaves_with_path(optax.tree.get(
      tunix.trainer.optimizer.opt_state, 'mu'))
  wanted = jax.tree.leaves(to_tunix(optax.tree.get(
      ours.state.opt_state, 'mu')))
  squares = 0
  for (path, mean), want in zip(found, wanted, strict=True):
    np.testing.assert_allclose(
        mean, want, rtol=0, atol=1e-4 * np.abs(want).max(), err_msg=str(path))
    squares += np.square(mean).sum()
  assert 10 * squares ** .5 == pytest.approx(_NORM, rel=1e-3)


def test_tunix_steps_on_the_workloads_prompts(with_ours, monkeypatch):
  """All samples have T tokens and are scored; the weights change."""
  workload, batch, tunix, *_ = with_ours
  trained = []
  update_actor = tunix.cluster.update_actor
  monkeypatch.setattr(
      tunix.cluster, 'update_actor', lambda rows, evaluated: (
          trained.extend(rows), update_actor(rows, evaluated)))
  weight = tunix.trainer.model.embedder.input_embedding
  before = np.array(weight[...])
  assert np.isfinite(tunix.step())
  rows, = trained
  np.testing.assert_array_equal(
      rows.prompt_ids,
      np.repeat(batch.token_BS[::workload.samples, :workload.prompt_tokens],
                workload.samples, 0))
  assert rows.completion_ids.shape == batch.mask_BT.shape
  assert rows.completion_mask.all()
  assert rows.old_per_token_logps.shape == batch.mask_BT.shape
  assert len({tuple(row) for row in rows.completion_ids.tolist()}) > 30
  assert (before != np.array(weight[...])).any()
  # The next rollout uses the updated weights.
  np.testing.assert_array_equal(
      tunix.cluster.rollout.model().embedder.input_embedding[...], weight[...])


def test_tunix_refuses_groups_of_one(tunix_peer):
  _refuses_groups_of_one(tunix_peer.TunixUpdate)


def _refuses_groups_of_one(peer):
  config = _config()
  config.rollout.samples = 1
  workload = workload_lib.of(config, mean_tokens=5)
  with pytest.raises(errors.InputError, match='rollout.samples'):
    peer(workload, workload.random_batch(), config.optimizer)


@pytest.mark.parametrize('name', registry.PEERS)
def test_every_peer_can_be_loaded(name):
  module, class_name, _ = registry.PEERS[name]
  for needed in ('torch', name):
    pytest.importorskip(needed)
  assert registry.load([name])[name].__name__ == class_name
  assert sys.modules[f'tepo_jax.tools.benchmark.{module}']


def test_an_unknown_peer_is_refused():
  with pytest.raises(errors.InputError, match="unknown peer 'vllm'"):
    registry.load(['vllm'])
