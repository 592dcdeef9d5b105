"""Decoding slots that fit, and the error if too few fit."""

import dataclasses
import functools

import jax
import pytest

from tepo_jax import errors
from tepo_jax.job import slots as slots_lib
from tepo_jax.policy import padding as padding_lib
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib

# Qwen2.5-7B: 2 x 28 layers x 4 heads x 128 x 2 bytes = 56 KiB a token.
MODEL = transformer.ModelConfig(
    vocab_size=152064, d_model=3584, num_layers=28, num_heads=28,
    num_kv_heads=4, head_dim=128, d_ff=18944, max_position=32768,
    dtype='bfloat16')


def _shapes(monkeypatch, free_gib, wanted=None, lengths=(1024, 7168),
            cache='rectangle', model=MODEL, work=512, carry=None, **shape):
  free = None if free_gib is None else int(free_gib * 2**30)
  monkeypatch.setattr(mesh_lib, 'free_bytes', lambda: free)
  mesh = mesh_lib.make(dict(data=1, fsdp=1, tensor=1) | shape,
                       jax.devices()[:max(shape.values(), default=1)])
  model = padding_lib.sharded_over(model, mesh.shape['tensor'])
  return slots_lib.sampling_shapes(
      model, mesh, cache=cache, wanted=wanted, work=work,
      prompt_tokens=lengths[0], max_tokens=lengths[1], chunk=32,
      **carry or {})


def test_slot_bytes_are_those_of_its_keys_and_values():
  mesh = mesh_lib.make(dict(data=1, fsdp=1, tensor=4), jax.devices())
  model = padding_lib.sharded_over(MODEL, 4)
  assert slots_lib.slot_bytes(model, mesh, 1000) == 1000 * 56 * 1024 / 4


def test_as_many_slots_as_fit(monkeypatch):
  """With columns to refill, 8,192 + 1,024: 504 MiB per slot, of 80 %."""
  shapes = _shapes(monkeypatch, 63)
  assert shapes.columns[-1] == 9216
  assert shapes.slots[-1] == int(0.8 * 63 * 1024 / 504)
  # Four devices, each with a quarter of the heads, or of the slots.
  assert _shapes(monkeypatch, 63, tensor=4).slots[-1] == 409
  assert _shapes(monkeypatch, 63, data=4).slots[-1] == 4 * 102


def test_slots_leave_memory_for_prefills(monkeypatch):
  """Prompts of 4,096 tokens: 224 MiB each; a prefill has 4, on every device all
  of them, and needs memory for 10. A slot has 287 MiB."""
  shapes = _shapes(monkeypatch, 10, lengths=(4096, 512), data=4)
  assert shapes.columns[-1] == 5248
  assert shapes.slots[-1] == 4 * int((0.95 * 10240 - 10 * 224) / 287)
  assert int(0.8 * 10240 / 287) == 28 > shapes.slots[-1] / 4
  # Who asks for more gets more.
  assert _shapes(monkeypatch, 10, 112, (4096, 512), data=4).slots[-1] == 112


def test_a_slot_for_each_completion_needs_no_spare_columns(monkeypatch):
  """8,192 columns, not 9,216: 512 take less than 456 or more with them."""
  shapes = _shapes(monkeypatch, 512 * 448 / 1024 / 0.8)
  assert shapes.slots[-1] == 512 and shapes.columns[-1] == 8192
  assert _shapes(monkeypatch, 511 * 448 / 1024 / 0.8).slots[-1] == 454


def test_no_more_slots_than_work(monkeypatch):
  for free in (None, 10**6):
    shapes = _shapes(monkeypatch, free)
    assert shapes.slots[-1] == 512 and shapes.columns[-1] == 8192
  assert _shapes(monkeypatch, None, wanted=32).slots[-1] == 32


@pytest.mark.parametrize('free, wanted', [(0.5, None), (63, 256)])
def test_too_large_a_cache_is_refused_with_its_size(monkeypatch, free, wanted):
  with pytest.raises(errors.InputError) as caught:
    _shapes(monkeypatch, free, wanted)
  said = str(caught.value)
  assert f'{wanted or 1} completions of up to 9216 tokens' in said
  assert f'{(wanted or 1) * 504 / 1024:.3g} GiB' in said
  assert f'{free} GiB' in said and 'config.rollout.slots' in said


def test_pages_are_of_the_mean_length_and_fill_their_share(monkeypatch):
  """3.5 MiB a page; of 8,192 tokens a sequence has a quarter, 34 pages with the
  copies, and 2 of a tail. The longest alone needs 130 and another 2."""
  kernel = dataclasses.replace(MODEL, attention='splash')
  shapes_of = functools.partial(_shapes, monkeypatch, cache='pages',
                                model=kernel)
  rectangle, shapes = _shapes(monkeypatch, 63), shapes_of(63)
  assert shapes.pages == int(0.8 * 63 * 1024 / 3.5)
  assert shapes.slots[-1] == shapes.pages // 36 > 4 * rectangle.slots[-1]
  whole = shapes_of(None, 32)
  assert whole.pages == 32 * (130 + 2) + 2
  # The tails of 3 slots have no place in 137 pages next to prefills of 16 rows,
  # or of 1, of 1,024 tokens.
  few = [(137.5 * 3.5 + 2.5 * rows * 56) / 1024 / 0.95 for rows in (16, 1)]
  assert shapes_of(few[0]).slots[-1] == 2
  with pytest.raises(errors.InputError, match='0.472 GiB.* only 0.47 of'):
    shapes_of(few[1], 3)
  # XLA gathers all columns of all slots.
  gathered = _shapes(monkeypatch, 63, cache='pages')
  assert gathered.slots[-1] == gathered.pages // 132


def test_the_kernels_table_fits_a_chips_scalar_memory(monkeypatch):
  """1 MiB, of which 960 KiB are for rows of 256 page numbers, of 4 bytes."""
  shapes_of = functools.partial(
      _shapes, monkeypatch, 10_000, lengths=(1024, 10_000), cache='pages',
      model=dataclasses.replace(MODEL, attention='splash'), work=2000)
  assert shapes_of().slots[-1] == 960
  with pytest.raises(errors.InputError, match='at most 960 completions'):
    shapes_of(1000)


def test_few_pages_for_the_slots_are_warned_of(monkeypatch, capsys):
  """40 slots of 34 pages and 2 of a tail."""
  model = dataclasses.replace(MODEL, attention='splash')
  for pages, warned in (40 * 36, False), (40 * 36 - 1, True):
    _shapes(monkeypatch, (pages + .5) * 3.5 / 1024 / 0.8, 40, cache='pages',
            model=model)
    assert ('pages for 2112 tokens' in capsys.readouterr().err) == warned


@pytest.mark.parametrize('cache', ['rectangle', 'pages'])
def test_a_run_that_carries_has_its_slots_and_pages_whatever_is_free(
    monkeypatch, cache):
  shapes_of = functools.partial(
      _shapes, monkeypatch, cache=cache, work=99, data=2,
      model=dataclasses.replace(MODEL, attention='splash'))
  first = shapes_of(12, carry=dict(carries=True))
  # Spare columns, as there is always more work, and prefills of completions.
  assert first.columns[-1] == 9216 and first.prompts[-1] == 8192
  assert first.prompts[:4] == (128, 256, 512, 1024)
  assert (first.slots[-1] < 99) == (cache == 'rectangle')
  for free in (1, 63):
    assert shapes_of(free, first.slots[-1], carry=dict(
        carries=True, pages=first.pages)) == first
  assert shapes_of(63, carry=dict(carries=True)) != first
