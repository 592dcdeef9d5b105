r"""math-verify on what the other modules cannot read, its errors corrected.

It is used with its LaTeX extraction alone: its expression extraction calls
sympy's parse_expr, which is `eval`, and model text never reaches eval
(latex2sympy lets it make numbers of its lexer's number tokens, nothing else).
Plain expressions are rewritten to LaTeX instead. Parsing and simplification
may hang: only workers that can be killed should come here.
"""

import itertools
import re
import threading
from collections.abc import Sequence

_PLAIN_TO_LATEX = (
    (re.compile(r'\b(?:np|numpy|math)\.'), ''),
    (re.compile(r'(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)'),
     r'\1\\times 10^{\2}'),
    (re.compile(r'^(-?\d+)\s+(\d+)/(\d+)$'), r'\1\\frac{\2}{\3}'),
    (re.compile(r'(?<![\\a-zA-Z])(pi)(?![a-zA-Z])'), r'\\\1'),
    (re.compile(r'(?<![\\a-zA-Z])'
                r'(exp|log|ln|sin|cos|tan|arcsin|arccos|arctan)(?=\s*\()'),
     r'\\\1'),
)
_DOTS = re.compile(r'\\(?:l|c|v|d)?dots|\.\.\.')
_BASE = re.compile(r'(?<=\d)_(?:\{(\d+)\}|(\d+))')
_BRACKETS = re.compile(r'^\s*(?:\\left)?\s*(\\\{|[(\[])')


def verify(answer: str, golds: Sequence[str], alarm_s: int
           ) -> tuple[bool, bool]:
  """math-verify's opinion: (verdict, whether an alarm went off).

  alarm_s: whole seconds for one parse or one comparison.
  """
  if threading.current_thread() is not threading.main_thread():
    raise RuntimeError('grading.grade has its alarms in the main thread only: '
                       'use grading.Grader')
  from math_verify import errors  # slow to import, and most runs do without
  timed_out = False
  for gold in golds:
    if _cannot_be(gold, answer):
      continue
    try:
      if _is_equal(gold, answer, alarm_s):
        return True, False
    except errors.TimeoutException:  # a BaseException
      timed_out = True
    except Exception:  # latex2sympy fails on the text: not equal.
      continue
  return False, timed_out


def _cannot_be(gold, answer):
  """Where math-verify is known to find equal what is not."""
  if _DOTS.search(gold) or _DOTS.search(answer):
    return True  # Equal texts have not come this far.
  if {_base(gold), _base(answer)} - {None} and _base(gold) != _base(answer):
    return True
  kinds = [match and match[1] for match in map(
      _BRACKETS.match, (gold, answer))]
  return None not in kinds and kinds[0] != kinds[1]


def _base(text):
  match = _BASE.search(text)
  return match and (match[1] or match[2])


def _is_equal(gold, answer, alarm_s):
  import math_verify
  config = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]

  def parse(text):
    return math_verify.parse(
        f'\\boxed{{{_as_latex(text)}}}', extraction_config=config,
        parsing_timeout=alarm_s, raise_on_error=True)

  for pair in itertools.product(parse(gold), parse(answer)):
    try:
      if math_verify.verify(
          *pair, timeout_seconds=alarm_s, raise_on_error=True
          ) and not _differ(*pair):
        return True
    except Exception:  # sympy cannot compare the two: not equal.
      continue
  return False


def _differ(first, second):
  """Numbers that are equal to math-verify since both round to 0."""
  if not (getattr(first, 'is_number', False)
          and getattr(second, 'is_number', False)):
    return False
  first, second = first.evalf(30), second.evalf(30)
  return bool(abs(first - second) > 1e-6 * abs(first))


def _as_latex(text):
  text = re.sub(r'(?<!\\)\$', '', text).strip().rstrip('.')
  for pattern, replacement in _PLAIN_TO_LATEX:
    text = pattern.sub(replacement, text)
  return text
