r"""Splits answers that are sentences into what math-verify can compare.

Of `The pairs are \((1,2)\) and \((2,1)\)` the formulas count, and between them
numbers and words such as "odd" and "not".
"""

import re

FORMULA = re.compile(r'(?<!\\)\\(?:\((.*?)\\\)|\[(.*?)\\\])', re.DOTALL)
# What counts in a sentence: formulas, and between them numbers and answers.
_PART = re.compile(
    FORMULA.pattern + r'|(-?\d+(?:\.\d+)?|\b(?:no|not|none|never|cannot|yes'
    r'|true|false|impossible|finite|infinite|odd|even)\b)',
    re.DOTALL | re.IGNORECASE)
WORDS = re.compile(r'\\(?:mbox|text(?:bf|it|rm|normal)?|math(?:rm|it|bf))\s*\{')
LAST_WORDS = re.compile(
    WORDS.pattern + r'([^{}]*)\}(?:\s*\^\s*\{?\d\}?)?[\s.,;$)\]]*$')
JOINING = re.compile(WORDS.pattern + r'[\s,]*(?:and|or)\s*\}')
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
# math-verify would multiply with such a word in the middle of an equation.
_EQUAL_IF = re.compile(WORDS.pattern + r'\s*(?:if|for|when|where|with)\s*\}(?=.*=)',
                       re.DOTALL)
_COMMA = re.compile(r'\s*[,;]\s*(?![^()\[\]{}]*[)\]}])|\s(?:and|or)\s')
# Words, and not letters of a product; formulas in such a sentence may have $.
PROSE = re.compile(r'(?:(?<![\\a-zA-Z{])[a-zA-Z]{2,} ){3}')
_DOLLARS = re.compile(r'(?<!\\)\$([^$]+)\$')


def pairs(reference: str, answer: str
          ) -> list[tuple[list[str], list[str]]] | None:
  """Texts that must be equal, in any order within each pair of lists; None if
  the answer is wrong already. Of a sentence alone, math-verify compares one
  formula, so those that the reference joins to its last are given too."""
  if bool(_DENIAL.search(reference)) != bool(_DENIAL.search(answer)):
    return None
  reference, answer = (
      _DOLLARS.sub(r'\\(\1\\)', text) if PROSE.search(text) else text
      for text in (reference, answer))
  wanted, given = _parts(reference), _parts(answer)
  if wanted and given:
    is_ordered = 'respectively' in reference + answer
    wanted, given = (_runs(parts, is_ordered) for parts in (wanted, given))
    return list(zip(wanted, given)) if len(wanted) == len(given) else None
  claims = _last_claims(wanted)
  if any(map(_RELATED.search, claims[:-1])):
    return [(claims, _COMMA.split(JOINING.sub(',', answer)))]
  conditioned = [_EQUAL_IF.split(text) for text in (reference, answer)]
  if len(conditioned[0]) == len(conditioned[1]):
    return [([wanted], [given]) for wanted, given in zip(*conditioned)]
  return [([reference], [answer])]


def _parts(text):
  """The formulas of a sentence and what counts between them, each with whether it
  is a formula and the words before it; [] of a formula alone."""
  if not FORMULA.sub('', text, count=1).strip(' .') or (
      not FORMULA.search(text)):
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
