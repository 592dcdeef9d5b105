r"""Asks math-verify about answers unreadable here; corrects known errors.

Uses only its LaTeX extraction: its expression extraction calls sympy's
parse_expr, which uses `eval`, and model text must never reach eval
(latex2sympy applies it to its lexer's number tokens, nothing else). Plain
expressions are rewritten to LaTeX instead. Parsing and simplification may
hang: call this only in workers that can be killed.
"""

from collections.abc import Sequence
import itertools
import re
import threading
from typing import Literal

_PLAIN_TO_LATEX = (
    (re.compile(r'\b(?:np|numpy|math)\.'), ''),
    (re.compile(r'(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)'),
     r'\1\\times 10^{\2}'),
    (re.compile(r'^(-?\d+)\s+(\d+)/(\d+)$'), r'\1\\frac{\2}{\3}'),
    (re.compile(r'(?<![\\a-zA-Z])(pi(?![a-zA-Z])|(?:exp|log|ln|sin|cos|tan'
                r'|arcsin|arccos|arctan)(?=\s*\())'), r'\\\1'),
)
# Parts that math-verify drops: bases, digits in \text{}, operands of \max,
# dots. (Texts of equal spelling were accepted before.)
_DROPPED = re.compile(r'\d\)?_|\\(?:text|mathrm|mbox)\s*\{[^{}]*\d'
                      r'|\\(?:max|min)\s*[a-zA-Z\d]|\\[lcvd]?dots|\.\.\.')
_LIMIT = re.compile(r'\\lim(?![a-zA-Z])')
# It reads one side of these.
_RELATION = re.compile(r'\\(?:approx|equiv|sim|cong)(?![a-zA-Z])|[≈≡≃≅≒]|\|_')
# If a brace ends the text, it drops all from the first words on.
_BRACED = re.compile(r'\}(?:\^\d)?[\s.$]*$')
_WORDS = re.compile(r'\\(?:mbox|text(?:bf|it|rm|normal)?|math(?:rm|it|bf))\s*\{')
_LAST_WORDS = re.compile(
    rf'(?:{_WORDS.pattern}[^{{}}]*\}}\s*(?:\^\{{?[1-4]\}}?)?(?:\s|/|\\cdot)*)+'
    r'[\s.,;:!$)\]}\\]*$')
_JOINING = re.compile(_WORDS.pattern + r'[\s,]*(?:and|or)\s*\}')
_INFINITY = re.compile(r'\\infty|∞')
_FORMULA = re.compile(r'(?<!\\)\\(?:\(.*?\\\)|\[.*?\\\])', re.DOTALL)
# What counts in a sentence: formulas, and between them numbers and answers.
_CLAIMS = (r'\b(?:no|not|none|never|cannot|yes|true|false|impossible|finite'
           r'|infinite|odd|even)\b')
_PART = re.compile(
    r'(?<!\\)\\(?:\((.*?)\\\)|\[(.*?)\\\])|(-?\d+(?:\.\d+)?|' + _CLAIMS + ')',
    re.DOTALL | re.IGNORECASE)
_RELATED = re.compile(r'[=<>]|\\(?:[lg]eq?|in|neq?|approx|equiv)(?![a-zA-Z])')
# "There are no others" denies nothing.
_DENIAL = re.compile(
    r"(?<!\\)\b(?:(?:no|not)(?!\s+(?:others?|more|less|fewer|greater|only|depend"
    r"|necessarily)\b)|none|never|neither|nor|cannot|impossible|\w+n't)\b",
    re.IGNORECASE)
# Between members of a list; between other formulas of which both are claimed;
# before a condition.
_JOINT = re.compile(r'[\s,]*(?:\b(?:and|or)\s*)?')
_CONTINUED = re.compile(r',\s*$|\b(?:and|or|otherwise|else)\b'
                        r'(?!.*\b(?:is|are|equals?|gives?)\b)', re.DOTALL)
_CONDITION = re.compile(
    r'\b(?:for|if|when|where|all|any|every|each|with|since|let|given)\s*$',
    re.IGNORECASE)
_COMMA = re.compile(r'\s*[,;]\s*(?![^()\[\]{}]*[)\]}])|\s(?:and|or)\s')
# Words, and not letters of a product; formulas in such a sentence may have $.
_PROSE = re.compile(r'(?:(?<![\\a-zA-Z{])[a-zA-Z]{2,} ){3}')
_DOLLARS = re.compile(r'(?<!\\)\$([^$]+)\$')
_OPERATED = re.compile(r'[-+*/^]\s*\\[(\[]|\\[)\]]\s*[-+*/^]')
_LETTER = re.compile(r'\W*(?:\\?[a-zA-Z]+|\\math\w+\s*\{\w+\})\W*')
_BRACKETS = re.compile(r'^\s*(?:\\left)?\s*(\\\{|[(\[])')
_CHOOSE = re.compile(r'\{\s*([^{}]+?)\s*\\choose(?![a-zA-Z])\s*([^{}]+?)\s*\}')
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

  alarm_s: limit of one parse or one comparison, in whole seconds.
  """
  if threading.current_thread() is not threading.main_thread():
    raise RuntimeError('grading.grade works in the main thread only, because '
                       'it uses alarms; use grading.Grader')
  def is_equal(reference, answer, alarm_s):
    reference, answer = (_CHOOSE.sub(r'\\binom{\1}{\2}', text)
                         for text in (reference, answer))
    return not _cannot_be(reference, answer) and _is_equal(
        reference, answer, alarm_s)

  return _any_equal(answer, references, alarm_s, is_equal)


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
  if _RELATION.search(answer) and not _RELATION.search(reference):
    return True
  # Of a sentence one formula is compared, without what is done to it; perhaps a
  # letter, which is no answer.
  if _OPERATED.search(answer):
    return True
  if _FORMULA.search(reference) and _LETTER.fullmatch(answer):
    return True
  if bool(_INFINITY.search(reference)) != bool(_INFINITY.search(answer)):
    return True
  kinds = [match and match[1] for match in map(
      _BRACKETS.match, (reference, answer))]
  return None not in kinds and kinds[0] != kinds[1]


def _loses_a_part(text):
  text = _JOINING.sub(',', text)
  words = _WORDS.search(text)
  return _DROPPED.search(text) or (
      words and _BRACED.search(text)
      and not _LAST_WORDS.match(text, words.start()))


def _is_equal(reference, answer, alarm_s):
  """Two sentences are compared by their parts. Of one sentence, math-verify
  compares one formula: those that the reference joins to its last are given
  too."""
  if bool(_DENIAL.search(reference)) != bool(_DENIAL.search(answer)):
    return False
  reference, answer = (
      _DOLLARS.sub(r'\\(\1\\)', text) if _PROSE.search(text) else text
      for text in (reference, answer))
  wanted, given = _parts(reference), _parts(answer)
  if wanted and given:
    is_ordered = 'respectively' in reference + answer
    wanted, given = (_runs(parts, is_ordered) for parts in (wanted, given))
    return len(wanted) == len(given) and all(
        _match(*runs, alarm_s) for runs in zip(wanted, given))
  claims = _last_claims(wanted)
  if any(map(_RELATED.search, claims[:-1])):
    return _match(claims, _COMMA.split(_JOINING.sub(',', answer)), alarm_s)
  return _are_equal(reference, answer, alarm_s)


def _parts(text):
  """The formulas of a sentence and what counts between them, each with whether it
  is a formula and the words before it; [] of a formula alone."""
  if not _FORMULA.sub('', text, count=1).strip(' .') or (
      not _FORMULA.search(text)):
    return []
  parts, end = [], 0
  for match in _PART.finditer(text):
    part = match[3] or match[1] or match[2] or ''
    parts.append((part.strip() if match[3] is None else part.lower(),
                  match[3] is None, text[end:match.start()]))
    end = match.end()
  return parts


def _runs(parts, is_ordered):
  """Groups formulas that only "and", "or" or a comma joins: their order does not
  count, unless they correspond to those of another group."""
  runs = []
  for i, (part, is_formula, words) in enumerate(parts):
    if is_formula and i and parts[i - 1][1] and _JOINT.fullmatch(words):
      runs[-1].append(part)
    else:
      runs.append([part])
  if is_ordered or sum(len(run) > 1 for run in runs) > 1:
    return [[part] for run in runs for part in run]
  return runs


def _last_claims(parts):
  """The last formula and those before it to which it is joined."""
  claims, words = [], ''
  for part, is_formula, before in parts:
    words += before
    if not is_formula or _CONDITION.search(words):
      continue
    claims = [*(claims if _CONTINUED.search(words) else ()), part]
    words = ''
  return claims


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
    mode = 'any_match' if _FORMULA.search(text) else 'first_match'
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
