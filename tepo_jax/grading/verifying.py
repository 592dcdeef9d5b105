r"""Asks math-verify about answers unreadable here; corrects known errors.

Uses only its LaTeX extraction: its expression extraction calls sympy's
parse_expr, which uses `eval`, and model text must never reach eval
(latex2sympy applies it to its lexer's number tokens, nothing else). Plain
expressions are rewritten to LaTeX instead. Parsing and simplification may
hang, and what ends them here are signals: call this only in `workers`.
"""

from collections.abc import Sequence
import functools
import itertools
import re
import signal
from typing import Literal

from tepo_jax.grading import answers
from tepo_jax.grading import sentences

CPU_S = 0.8  # that `verify` gives math-verify: a verdict takes less than 1 s
_AGAIN_S = 0.1
_WARM_UP_S = 60  # on a busy machine

_PLAIN_TO_LATEX = (
    (re.compile(r'\b(?:np|numpy|math)\.'), ''),
    (re.compile(r'(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)'),
     r'\1\\times 10^{\2}'),
    (re.compile(r'^(-?\d+)\s+(\d+)/(\d+)$'), r'\1\\frac{\2}{\3}'),
    (re.compile(r'(?<![\\a-zA-Z])(pi(?![a-zA-Z])|(?:exp|log|ln|sin|cos|tan'
                r'|arcsin|arccos|arctan)(?=\s*\())'), r'\\\1'),
)
# Parts that math-verify drops: bases, primes of numbers, digits in \text{},
# operands of \max, dots. (Texts of equal spelling were accepted before.)
_DROPPED = re.compile(r"\d\)?_|\d'" r'|\\(?:text|mathrm|mbox)\s*\{[^{}]*\d'
                      r'|\\(?:max|min)\s*[a-zA-Z\d]|\\[lcvd]?dots|\.\.\.')
_LIMIT = re.compile(r'\\lim(?![a-zA-Z])')
# It reads one side of these: the other one must be spelled alike.
_RELATION = re.compile(
    r'(?:\\(?:approx|equiv|sim|cong)(?![a-zA-Z])|[≈≡≃≅≒]|\|_)(.*)', re.DOTALL)
# If a brace ends the text, it drops all from the first words on.
_BRACED = re.compile(r'\}(?:\^\d)?[\s.$]*$')
_LAST_WORDS = re.compile(
    rf'(?:{sentences.WORDS.pattern}[^{{}}]*\}}(?:\s*\^\{{?[1-4]\}}?)?'
    r'(?:\s|/|\\cdot)*)+'
    r'[\s.,;:!$)\]}\\]*$')
_OPERATED = re.compile(r'[-+*/^]\s*\\[(\[]|\\[)\]]\s*[-+*/^]')
_LETTER = re.compile(r'\W*(?:\\?[a-zA-Z]+|\\math\w+\s*\{\w+\})\W*')
# What takes it seconds: deep nesting, towers and factorials of large numbers.
MAX_NESTING = 10
_LARGE = re.compile(
    r'[\d)}]\s*(?:\^|\*\*)\s*[{(]*\s*(?:-?\d+\)?\s*(?:\^|\*\*|!)|\d{4})'
    r'|\d{5}[)}]*\s*!|![\s)}]*!|\\[dt]?binom\s*\{?\(?\d{5}'
    r'|\\[dt]?binom\s*\{?\(?\d+\s*\^|\\prod.*\^\s*\{?\s*(?:\d{4}|\d+\s*\^)'
    r'|\\sum\s*(?:\\limits)?\s*(?:_\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\w)\s*)?'
    r'\^\s*\{?\s*(?:\d{4}|\d+\s*\^)', re.DOTALL)
# These it computes at once where only sums, products and quotients are left.
MAX_POWERS = 4
_POWER = re.compile(r'(?<![\d.])\d{1,4}\s*(?:\^|\*\*)\s*'
                    r'(?:\{\s*(?:\d{1,3}|[12]\d{3})\s*\}'
                    r'|(?:\d{1,3}|[12]\d{3})(?!\d))')
_COMPUTED = re.compile(
    r'[\^!]|\*\*|\\(?!(?:text|mathrm|mbox|[dt]?frac|cdot|times|left|right|leq?'
    r'|geq?|neq?)(?![a-zA-Z]))[a-zA-Z]')


def _is_too_large(text: str) -> bool:
  """Whether math-verify would compute something huge, or parse for seconds."""
  depth = deepest = 0
  for bracket in re.findall(r'[()\[\]{}]', text):
    depth += 1 if bracket in '([{' else -1
    deepest = max(deepest, depth)
  return deepest > MAX_NESTING or text.count('|') > MAX_NESTING or bool(
      _LARGE.search(text)) and not _has_only_powers(text)


def _has_only_powers(text):
  """Whether nothing but `2^{2024}` and the like takes math-verify long."""
  left, count = _POWER.subn('1', text)
  return count <= MAX_POWERS and not _COMPUTED.search(left)


def verify(answer: str, references: Sequence[str], alarm_s: int
           ) -> tuple[bool, bool]:
  """Asks math-verify: (verdict, whether an alarm went off).

  alarm_s: limit of one parse or one comparison, in whole seconds. All of them
  together have CPU_S of this process's CPU time; an answer that takes longer is
  wrong. SIGPROF's handler stays set.
  """
  _warm_up()  # before the clock starts
  is_over = False

  def stop(*_):
    if not is_over:  # else the signal is late
      raise _OutOfTime

  signal.signal(signal.SIGPROF, stop)
  # Repeatedly: a bare `except:` may swallow what `stop` raises.
  signal.setitimer(signal.ITIMER_PROF, CPU_S, _AGAIN_S)
  try:
    return _any_equal(answer, references, alarm_s, _is_equal)
  except _OutOfTime:
    return False, True
  finally:
    is_over = True
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)  # math-verify's, if `stop` came before its own `finally`


@functools.cache
def _warm_up():
  """Imports the parser's and sympy's modules and fills their first caches,
  which takes as long as CPU_S."""
  gold, target = (
      _parse(rf'x=\sum_{{k=0}}^{{n}} {factors}', _WARM_UP_S)
      for factors in ('a_k b_{n-k}', 'b_{n-k} a_k'))
  import math_verify
  math_verify.verify(gold, target, timeout_seconds=_WARM_UP_S)


class _OutOfTime(BaseException):  # No library may take it for its own error.
  pass


def verify_alone(answer: str, references: Sequence[str], alarm_s: int
                 ) -> tuple[bool, bool]:
  """math-verify's own verdict with its default settings: both texts in a box.

  Its default also reads plain expressions, with sympy's parse_expr, which calls
  `eval`: here too only its LaTeX extraction is used.
  """
  import math_verify

  def is_equal(reference, answer, alarm_s):
    return math_verify.verify(
        _parse(reference, alarm_s), _parse(answer, alarm_s),
        timeout_seconds=alarm_s, raise_on_error=True)

  return _any_equal(answer, references, alarm_s, is_equal)


def _any_equal(answer, references, alarm_s, is_equal):
  from math_verify import errors  # slow to import and rarely needed
  timed_out = False
  for reference in references:
    try:
      if is_equal(reference, answer, alarm_s):
        return True, False
    except errors.TimeoutException:  # a BaseException
      timed_out = True
    except Exception:  # It cannot read or compare the two: not equal.
      continue
  return False, timed_out


def _parse(text, alarm_s,
           mode: Literal['any_match', 'first_match'] = 'any_match'):
  import math_verify
  return math_verify.parse(
      f'\\boxed{{{text}}}', extraction_config=[
          math_verify.LatexExtractionConfig(boxed_match_priority=0)],
      extraction_mode=mode, parsing_timeout=alarm_s, raise_on_error=True)


def _cannot_be(reference, answer):
  """Whether math-verify is known to wrongly call such texts equal."""
  if any(_is_too_large(text) or _loses_a_part(text)
         for text in (reference, answer)):
    return True
  # Of an equation for a limit it drops the right side.
  if all(map(_LIMIT.search, (reference, answer))):
    return True
  if _ends_differently(reference, answer):
    return True
  # Of a sentence one formula is compared, without what is done to it; perhaps a
  # letter, which is no answer.
  if _OPERATED.search(answer):
    return True
  return bool(sentences.FORMULA.search(reference) and _LETTER.fullmatch(answer))


def _ends_differently(reference, answer):
  """Whether the texts after a relation differ, or the words at their ends."""
  sides = [match and ''.join(match[1].split())
           for match in map(_RELATION.search, (reference, answer))]
  if sides[1] is not None and sides[0] != sides[1]:
    return True
  words = [re.sub(r'(?<=..)s$', '', match[1].casefold().strip(' ~.,'))
           for match in map(sentences.LAST_WORDS.search, (reference, answer))
           if match]
  return all(words) and len(set(words)) == 2


def _loses_a_part(text):
  text = sentences.JOINING.sub(',', text)
  words = sentences.WORDS.search(text)
  return _DROPPED.search(text) or (
      words and _BRACED.search(text)
      and not _LAST_WORDS.match(text, words.start()))


def _is_equal(reference, answer, alarm_s):
  reference, answer = map(answers.without_choose, (reference, answer))
  if _cannot_be(reference, answer):
    return False
  pairs = sentences.pairs(reference, answer)
  return pairs is not None and all(_match(*pair, alarm_s) for pair in pairs)


def _match(wanted, given, alarm_s):
  """Whether each has an equal in the other, in any order."""
  left = list(given)
  for part in wanted:
    place = next((i for i, other in enumerate(left)
                  if part == other or _are_equal(part, other, alarm_s)), None)
    if place is None:
      return False
    left.pop(place)
  return not left


def _are_equal(reference, answer, alarm_s):
  import math_verify
  import sympy

  def parse(text):
    # Of what cannot be read as a whole, any_match reads the last fraction or
    # formula. Only a sentence, whose formulas are marked, is compared by one.
    mode = 'any_match' if sentences.FORMULA.search(text) else 'first_match'
    return _parse(_as_latex(text), alarm_s, mode)

  for pair in itertools.product(parse(reference), parse(answer)):
    if isinstance(pair[0], sympy.Eq) and not pair[0].free_symbols:
      continue  # It would equal every equation without solutions.
    try:
      if math_verify.verify(
          *pair, timeout_seconds=alarm_s, raise_on_error=True
          ) and not _differ(*pair):
        return True
    except Exception:  # sympy cannot compare the two: not equal.
      continue
  return False


def _differ(first, second):
  """Whether two numbers differ that math-verify rounds to 0."""
  if not all(getattr(n, 'is_number', False) for n in (first, second)):
    return False
  first, second = first.evalf(30), second.evalf(30)
  return bool(abs(first - second) > 1e-6 * abs(first))


def _as_latex(text):
  text = re.sub(r'(?<!\\)\$', '', text).strip().rstrip('.')
  for pattern, replacement in _PLAIN_TO_LATEX:
    text = pattern.sub(replacement, text)
  return text
