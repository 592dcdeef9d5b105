"""Closed forms: their trees' values, and bounds that hold for any text."""

import fractions
import random
import re
import time

import pytest

from tepo_jax import grading
from tepo_jax.grading import answers
from tepo_jax.grading import comparison
from tepo_jax.grading import evaluation
from tepo_jax.grading import expressions
from tepo_jax.grading import structures
from tepo_jax.grading import values

F = fractions.Fraction


@pytest.mark.parametrize('text, value', [
    ('2+3*4', 14), ('2-3-4', -5), ('-2^2', -4), ('2^3^2', 512), ('12/4/3', 1),
    (r'\frac12', F(1, 2)), (r'\frac1{72}', F(1, 72)),
    (r'1\frac{4}{5}', F(9, 5)),
    ('2 2/3', F(8, 3)), ('22/3', F(22, 3)), ('0.125', F(1, 8)), ('5!/3!', 20),
    ('2(3)(4)', 24), (r'\binom52', 10), (r'\lceil 7/2\rceil', 4), ('|-3|', 3),
    ('2^{-2}', F(1, 4)), (r'3\cdot4\div6', 2), ('-(-(3))', 3),
    (r'10^{2}/5', 20)])
def test_rational_values_are_exact(text, value):
  assert values.fingerprint(expressions.parse(text)) == (
      f'{F(value).numerator:x}/{F(value).denominator:x}')


@pytest.mark.parametrize('text, decimal', [
    (r'\sqrt2', '1.4142135623730950488'), (r'\pi', '3.1415926535897932385'),
    (r'\sqrt[3]{2}', '1.2599210498948731648'), ('e', '2.7182818284590452354'),
    (r'\ln 2', '0.69314718055994530942'),
    (r'\log_2 3', '1.5849625007211561815'),
    (r'\sin 1', '0.84147098480789650665'),
    (r'\arctan 2', '1.1071487177940905030'),
    (r'\cos^2 1', '0.29192658172642880650'),
    (r'\tan^{-1}2', '1.1071487177940905030'),
    (r'(-2)^{1/3}', '-1.2599210498948731648')])
def test_irrational_values(text, decimal):
  tree = expressions.parse(text)
  assert values.is_within(tree, expressions.parse(decimal),
                               F(1, 10**18)), text


def test_points_distinguish_functions():
  for first, second, same in (
      ('n(n+1)', 'n^2+n', True), ('n(n+1)', 'n^2-n', False),
      ('|x|', 'x', None), (r'\sqrt{x^2}', 'x', None),
      ('(-1)^n', r'\cos(n\pi)', None), (r'\sqrt{ab}', r'\sqrt a\sqrt b', None),
      (r'\ln\frac1x', r'-\ln x', True), ('f(x)', 'f(y)', False)):
    assert values.equal(
        expressions.parse(first), expressions.parse(second)) is same, first


def test_brackets_may_be_nested_to_a_bound():
  at_most = expressions.MAX_DEPTH - 1  # inside the expression itself
  assert values.equal(*(expressions.parse('(' * n + '1' + ')' * n)
                        for n in (0, at_most)))
  with pytest.raises(expressions.Unreadable):
    expressions.parse('(' * (at_most + 1) + '1' + ')' * (at_most + 1))


def test_a_sum_cancels_only_if_most_of_its_digits_are_lost():
  for text, is_cancelled in ((r'1000\sqrt2-999\sqrt2', False),
                             (r'\sqrt2^2-2', True)):
    found = evaluation.Values('constant', evaluation.DIGITS)
    found.of(expressions.parse(text))
    assert found.cancelled is is_cancelled, text


@pytest.mark.parametrize('text', [
    '', '1 2', '1+', '(1', '1)', r'\frac{1}{', '^2', '2^', r'\unknown', '*3',
    'a,b', 'a=b', r'\text{a', '(' * 3000, '-' * 3000, '2^' * 700 + '2',
    r'\sqrt' * 700, r'\sin' * 700, r'\sin' * 190 + ' 1', '1' * 5000])
def test_other_texts_are_unreadable(text):
  with pytest.raises(expressions.Unreadable):
    values.equal(expressions.parse(text), expressions.parse('1'))


@pytest.mark.parametrize('text', [
    r'9^{9^{9^9}}', '99999!', '9!!!!', r'e^{10^{30}}', r'\binom{10^9}{5}',
    r'\sin 10^{99}', '1/0', '4999!' * 60, r'\tan(\ln 0)'])
def test_values_beyond_the_bounds_are_refused_at_once(text):
  with pytest.raises(expressions.Unreadable):
    values.fingerprint(expressions.parse(text))


def test_a_large_power_is_shown_by_its_digits():
  """700 million bits are not written out; equal values give equal text."""
  shown, same, other = (
      values.fingerprint(expressions.parse(text))
      for text in ('2^{700000000}', '4^{350000000}', '2^{700000001}'))
  assert shown == same != other
  assert len(shown) < 100


def _noise(rng, references, pieces):
  reference = rng.choice(references)
  place = rng.randint(0, len(reference))
  return rng.choice((
      ''.join(rng.choices(pieces, k=rng.randint(1, 40))),
      reference[:place] + rng.choice(pieces) + reference[place:],
      reference[:place] + rng.choice(references)[rng.randint(0, 5):],
      reference[:place] + rng.choice(pieces) * rng.randint(1, 300)))[:2000]


def test_no_text_crashes_or_delays_parsing():
  """Reads random sequences of pieces of answers."""
  references = [
      r'\left( 3, \frac{\pi}{2} \right)', r'(-\infty, 2) \cup (3, \infty)',
      r'\{1\pm\sqrt{5},-2\}', '52_8', r'x \in [-2,7]', r'\frac{2n-1}{5!}',
      r'\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}', r'1620 \mathrm{~mm}^{2}',
      r'\lfloor\log _{2} n\rfloor+1', '-2<x<7', r'e^{-t} I(0)', r'9\%',
      r'\binom{n}{2} 2^{n-2}', '8.7e8', r'x=1 \text{ or } y^{\prime}=2']
  pieces = [piece for reference in references for piece in re.findall(
      r'\\[a-zA-Z]+|\\.|.', reference)]
  pieces += ['\\', '}', '|', '99999', '!', '4999!']
  rng, slowest = random.Random(0), 0
  for _ in range(4000):
    text, start = _noise(rng, references, pieces), time.process_time()
    reference = rng.choice(references)
    try:
      nodes = [structures.try_read(answers.canonical(t))
               for t in (reference, text)]
    except expressions.TooLarge:
      nodes = [None]
    if None not in nodes:
      assert comparison.same(*nodes) in (True, False, None)
      assert comparison.same(nodes[1], nodes[1]) in (True, None)
    grading.canonical_key(text)
    slowest = max(slowest, time.process_time() - start)
  assert slowest < 5  # milliseconds; a hang would be hours
