r"""Grades wrong answers made from the local data sets, and prints those accepted.

  python -m tests.grading.wrong_pairs [INTEGERS [OTHERS]]

Makes up to INTEGERS (1) wrong answers of each kind from a reference that is an
integer and OTHERS (2) from another one. An accepted answer that sympy finds
equal by numbers is counted only; each other one is printed, to be looked at. A
copied formula is wrong even if it is equal. Takes some minutes.
"""

import collections
import functools
import pathlib
import random
import re
import sys
import time

import math_verify
from math_verify import errors
import sympy

from tepo_jax.data import datasets
from tepo_jax.grading import grader
from tests.data import benchmarks

_SHARED = pathlib.Path(__file__).parents[3] / 'shared' / 'benchmarks'
_FILES = benchmarks.FILES | {
    'omni_math_full': 'omni_math', 'math_train_deepscaler': 'math500'}
_UNITS = ('kg', 'cm', 'hours', 'dollars', 'hundred', 'dozen', 'squared')
_FORMULA = re.compile(r'\$\$?(.+?)\$|\\[(\[](.+?)\\[)\]]', re.DOTALL)
_UNIT = re.compile(r'\\(?:text|mathrm)\s*\{[^{}]*\}(?=\s*(?:\^\S+)?\s*\$*$)')


def _digits(rng, text, _):
  place = rng.choice([m.start() for m in re.finditer(r'\d', text)] or [None])
  if place is not None:
    digit = rng.choice([d for d in '0123456789' if d != text[place]])
    yield text[:place] + digit + text[place + 1:]


def _signs(rng, text, _):
  signs = [match.start() for match in re.finditer(r'[-+]', text)]
  if signs:
    place = rng.choice(signs)
    yield text[:place] + '+-'[text[place] == '+'] + text[place + 1:]
  if re.match(r'[\d\\a-z]', text) and text.strip('0.'):
    yield '-' + text


def _units(rng, text, _):
  unit = rng.choice(_UNITS)
  if _UNIT.search(text):
    yield _UNIT.sub(lambda _: f'\\text{{ {unit}}}', text)
  elif unit in _UNITS[-3:] and re.fullmatch(r'-?\d+', text) and (
      text not in ('0', '1')):
    yield f'{text}\\text{{ {unit}}}'


def _fewer(rng, text, _):
  depth, places = 0, []
  for index, letter in enumerate(text):
    depth += (letter in '([{') - (letter in ')]}')
    if letter == ',' and depth <= 1:
      places.append(index)
  if places and not re.fullmatch(r'[-\d,.$ ]+', text.replace(', ', ';')):
    place = rng.choice(places)
    after = next((p for p in places if p > place), None)
    if after is not None:
      yield text[:place] + text[after:]
    else:
      yield text[:place] + ''.join(re.findall(r'(?:\\?[)\]}]|\$)+$', text))


def _formulas(rng, _, problem):
  found = [first or second for first, second in _FORMULA.findall(problem)]
  yield from rng.sample(found, min(2, len(found)))


_KINDS = {'digits': _digits, 'signs': _signs, 'units': _units,
          'fewer': _fewer, 'formulas': _formulas}


def _pairs(integers, others):
  """{(answer, reference): kind}."""
  made = {}
  for file, name in _FILES.items():
    problems = datasets.load(f'{name}:{_SHARED / file}.jsonl', skip_bad=99)
    texts = [problem.answers[0] for problem in problems]
    for problem in problems:
      reference = problem.references[0]
      rng = random.Random(reference.text + problem.problem)
      is_integer = re.fullmatch(r'-?\d+', reference.text)
      for _ in range(integers if is_integer else others):
        made[rng.choice(texts), reference] = 'exchanged'
        for kind, make in _KINDS.items():
          for answer in make(rng, reference.text, problem.problem):
            made.setdefault((answer, reference), kind)
  plain = functools.partial(re.sub, r'[\s$]|\\(?:left|right)(?![a-z])|\\!', '')
  return {pair: kind for pair, kind in made.items()
          if pair[0].count('{') == pair[0].count('}')
          and plain(pair[0]) != plain(pair[1].text)}


def _are_equal_numbers(answer, reference):
  """By sympy alone, at fixed values of the variables."""
  try:
    values = [_by_sympy(text) for text in (answer, reference)]
    return bool(abs(values[0] - values[1]) <= 1e-6 * abs(values[1]))
  except (Exception, errors.TimeoutException):
    return False  # Somebody looks at it.


def _by_sympy(text):
  found = math_verify.parse(f'\\boxed{{{text}}}', extraction_config=[
      math_verify.LatexExtractionConfig(boxed_match_priority=0)])
  places = {symbol: sympy.Rational(sum(map(ord, symbol.name)), 71)
            for symbol in found[0].free_symbols}
  return found[0].subs(places).evalf(30)


def _grade(answer, reference):
  verdict, undecided = grader.decide_quickly(answer, (reference,))
  if verdict is None:
    verdict, _ = grader.ask_math_verify(answer, undecided)
  return verdict


def main(integers=1, others=2):
  counts, start = collections.Counter(), time.perf_counter()
  for (answer, reference), kind in _pairs(int(integers), int(others)).items():
    counts[kind, 'pairs'] += 1
    if not _grade(answer, reference):
      continue
    counts[kind, 'accepted'] += 1
    if kind == 'formulas' or not _are_equal_numbers(answer, reference.text):
      counts[kind, 'to be looked at'] += 1
      problem = repr(reference.problem)[-300:] if kind == 'formulas' else ''
      print(kind, repr(reference.text), repr(answer), reference.unit, problem,
            sep=' | ', flush=True)
  for (kind, what), count in sorted(counts.items()):
    print(f'{kind}: {count} {what}')
  print(f'{time.perf_counter() - start:.0f} s')


if __name__ == '__main__':
  main(*sys.argv[1:])
