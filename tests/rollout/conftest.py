"""Engines of toy models, shared by the tests of the schedule."""

import dataclasses

import jax
import numpy as np
import pytest

from tepo_jax.job import sampling as sampling_lib
from tepo_jax.rollout import draw
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import schedule
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.runtime import mesh as mesh_lib


@dataclasses.dataclass
class Engine:
  """A schedule with its weights; `sample` runs a queue."""
  schedule: schedule.Schedule
  weights: object

  def sample(self, prompts, group_size, max_tokens, seed=0, ids=None):
    """{(id, sample): Completion}, and the Stats."""
    ids = range(len(prompts)) if ids is None else ids
    limits = np.broadcast_to(max_tokens, (len(prompts), group_size))
    stats = schedule.Stats()
    queue = [groups_lib.Request(tuple(map(int, tokens)), int(i), list(limit))
             for tokens, i, limit in zip(prompts, ids, limits)]
    done = [completion for some in self.schedule.run(
        self.weights, groups_lib.Queue(queue), jax.random.key(seed), stats)
            for completion in some]
    got = {(c.request.prompt_id, c.sample): c for c in done}
    assert len(got) == len(done)  # no duplicates
    return got, stats


@pytest.fixture(scope='session')
def make_engine():
  """(model, params, …) -> Engine."""

  def make(model, params, *, slots, prompt_tokens, max_tokens, chunk=4,
           decoding=draw.Decoding(), eos_ids=(-1,), mesh=None, work=10**6,
           stop=None, **shapes):
    if mesh is None:
      mesh = mesh_lib.make(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    cache = 'pages' if shapes.get('page') else 'rectangle'
    programs = sampling_lib.maker(cache)(
        model, mesh, decoding=decoding, eos_ids=eos_ids, chunk=chunk)
    default = shapes_lib.make(
        slots=slots, work=work, prompt_tokens=prompt_tokens,
        max_tokens=max_tokens, chunk=chunk,
        shards=mesh_lib.batch_shards(mesh))
    weights = sampling_lib.make_decode_cast(model, mesh)(
        jax.device_put(params, mesh_lib.replicated(mesh)))
    return Engine(schedule.Schedule(
        programs, dataclasses.replace(default, **shapes), stop), weights)

  return make
