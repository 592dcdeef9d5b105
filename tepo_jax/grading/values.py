"""Compares trees of `expressions` by their values.

Rational values are exact fractions, others have many digits. Variables take
values derived from their names. Every step is bounded: a tree beyond the
bounds raises expressions.TooLarge, before anything large is computed.

Values count as equal if they agree to 35 significant digits (70 % of DIGITS):
`2^{10^{-40}}` is 1.
"""

from collections.abc import Sequence
import fractions

from tepo_jax.grading import evaluation
from tepo_jax.grading import expressions

_MIXED_POINTS = tuple(f'mixed {i}' for i in range(12))
_STEP_POINTS = (*(f'small {i}' for i in range(13)),  # all of 1 to 13
                *(f'large {i}' for i in range(1, 9)))


def equal(first: tuple, second: tuple) -> bool | None:
  """Whether two trees are the same function; None if undecided.

  True if they agree at generic points of either sign (positive ones only,
  where others give no real value), and also at integers if they have a floor
  or the like. None if they agree only at positive points or only at integers.
  """
  infinities = expressions.infinity(first), expressions.infinity(second)
  if infinities != (0, 0):
    return first == second or infinities[0] == infinities[1] is not None
  names = expressions.symbols(first) | expressions.symbols(second)
  if not names:
    return _same_at(first, second, 'constant')
  if (_has_steps(first) or _has_steps(second)) and not all(
      _agree(first, second, points) for points in _STEP_POINTS):
    return False
  for points in ('positive', 'other'):
    if not _same_at(first, second, points):
      return None if _are_same_integers(first, second) else False
  if _is_real(first, 'negative'):
    points = _MIXED_POINTS[:2 if len(names) == 1 else None]
    return _same_at(first, second, 'negative') and all(
        _agree(first, second, p, if_real=True) for p in points) or None
  return _are_same_integers(first, second) or None


def all_equal(sides: Sequence[tuple]) -> bool:
  """Whether an equation's sides are equal. One with variables of which that is
  not known is a condition on them: False.

  Raises:
    expressions.Unreadable: undecided, without variables.
  """
  if len(set(map(expressions.symbols, sides))) > 1:
    return False
  try:
    return all(equal(side, sides[-1]) for side in sides[:-1])
  except expressions.Unreadable:
    if any(map(expressions.symbols, sides)):
      return False
    raise


def _has_steps(tree):
  """Whether it has a floor, a ceiling or (-1)^n."""
  return (tree[0] == 'call' and tree[1] in ('floor', 'ceil')
          or tree[0] == 'power' and tree[1][0] == 'negative'
          or any(map(_has_steps, expressions.subtrees(tree))))


def _agree(first, second, points, if_real=False):
  """Whether they agree at these points, as far as their values are reliable, and
  with `if_real` only where both are real."""
  try:
    with evaluation.LOCK:
      values = evaluation.Values(points, evaluation.DIGITS)
      a, b = values.of(first), values.of(second)
      return _close(a, b, evaluation.DIGITS) or values.cancelled or if_real and any(
          values.context.im(values.real(value)) for value in (a, b))
  except expressions.Unreadable:  # e.g. a factorial
    return True


def _is_real(tree, points):
  with evaluation.LOCK:
    try:
      values = evaluation.Values(points, evaluation.DIGITS)
      return not values.context.im(values.real(values.of(tree)))
    except expressions.Unreadable:  # e.g. the floor of a complex number
      return False


def _are_same_integers(first, second):
  return all(_same_at(first, second, p) for p in ('whole', 'bigger'))


def proportional(first: tuple, second: tuple) -> bool:
  """Whether first / second is the same nonzero value at several points."""
  with evaluation.LOCK:
    points = [evaluation.Values(points, evaluation.DIGITS)
              for points in ('positive', 'other', 'negative')]
    ratios = [values.of(('quotient', first, second)) for values in points]
    if any(values.cancelled or ratio == 0 or _is_infinite(ratio)
           for values, ratio in zip(points, ratios)):
      raise expressions.Unreadable('0 or infinite')
    return all(_close(ratios[0], ratio, evaluation.DIGITS) for ratio in ratios
               ) and all(_may_have_ratio(first, second, ratios[0], points)
                         for points in _MIXED_POINTS)


def _may_have_ratio(first, second, ratio, points):
  try:
    values = evaluation.Values(points, evaluation.DIGITS)
    found = values.of(('quotient', first, second))
  except expressions.Unreadable:  # e.g. 0 / 0
    return True
  return _close(ratio, found, evaluation.DIGITS) or values.cancelled or bool(
      values.context.im(values.real(found)))  # of a root


def is_within(first: tuple, second: tuple,
              absolute: fractions.Fraction = fractions.Fraction(0),
              relative: fractions.Fraction = fractions.Fraction(0)) -> bool:
  """|first - second| <= absolute + relative |first|, for finite constants."""
  if expressions.infinity(first) != 0 or expressions.infinity(second) != 0:
    return False
  with evaluation.LOCK:
    values = evaluation.Values('constant', evaluation.DIGITS)
    a, b = values.of(first), values.of(second)
    if not evaluation.are_exact(a, b):
      a, b, absolute, relative = map(values.real, (a, b, absolute, relative))
      if _is_infinite(a) or _is_infinite(b):  # e.g. of \ln 0
        return False
    return bool(a == b or abs(a - b) <= absolute + relative * abs(a))


def rounds_to(decimal: tuple, exact: tuple, text: str) -> bool:
  """Whether a constant rounds to a decimal, whose digits are `text`."""
  places = len(text.partition('.')[2])
  return is_within(decimal, exact, fractions.Fraction(1, 2 * 10**places))


def rational(tree: tuple) -> fractions.Fraction | None:
  """The exact value of a constant tree; None if it is not rational."""
  with evaluation.LOCK:
    value = evaluation.Values('constant', evaluation.DIGITS).of(tree)
    return value if evaluation.are_exact(value) else None


def order(tree: tuple):
  """A key by which real constants can be sorted."""
  with evaluation.LOCK:
    values = evaluation.Values('constant', evaluation.DIGITS)
    return values.context.re(values.real(values.of(tree)))


def fingerprint(tree: tuple) -> str:
  """Writes out digits of the value, or of values at points of variables."""
  points = (('positive', 'negative') if expressions.symbols(tree)
            else ('constant',))
  with evaluation.LOCK:
    return ' '.join(_shown(evaluation.Values(p, evaluation.DIGITS), tree) for p in points)


def _shown(values, tree):
  value, context = values.of(tree), values.context
  if evaluation.are_exact(value):
    return f'{value.numerator:x}/{value.denominator:x}'
  if values.cancelled:
    value = context.chop(value, context.mpf(10) ** -30)
  if context.isinf(value):
    return str(value)
  parts = context.re(value), context.im(value)
  if context.mag(value) <= evaluation.MAX_BITS and value == context.nint(parts[0]):
    return f'{int(parts[0]):x}/1'
  return '+'.join(context.nstr(
      part if abs(part) > abs(value) / 10**30 else 0 * part, 40)
                  for part in parts)


def _same_at(first, second, points):
  with evaluation.LOCK:
    gap = None
    for digits in (evaluation.DIGITS, evaluation.MANY_DIGITS, evaluation.MOST_DIGITS):
      values = evaluation.Values(points, digits)
      a, b = values.of(first), values.of(second)
      is_close = _close(a, b, digits)
      if is_close and values.rounded:
        break
      # A cancelled sum may be all rounding error; an absorbed term may differ.
      is_unsure = values.absorbed if is_close else values.cancelled
      if evaluation.are_exact(a, b) or _is_infinite(a) or _is_infinite(b) or (
          not is_unsure):
        return is_close
      a, b = values.real(a), values.real(b)
      previous, gap = gap, abs(a - b)
      if is_close or previous is None:
        continue
      accuracy = values.real(10) ** -evaluation.DIGITS
      if gap > previous * accuracy**2:  # not rounding error: it stays
        return False
      # Rounding error may be large and shrink; only a small gap is equality.
      if gap <= accuracy * max(min(abs(a), abs(b)), accuracy):
        return True
    raise expressions.Unreadable('too large')


def _close(a, b, digits):
  """Whether a and b agree but for the last digits."""
  if evaluation.are_exact(a, b):
    return a == b
  context = evaluation.context()
  a, b = context.convert(a), context.convert(b)
  if _is_infinite(a) or _is_infinite(b):
    return bool(a == b)
  tiny = context.mpf(10) ** (-7 * digits // 10)
  return bool(abs(a - b) <= tiny * max(abs(a), abs(b)))


def _is_infinite(value):
  """Infinities equal only themselves: any number is relatively close to one."""
  return bool(evaluation.context().isinf(evaluation.context().convert(value)))
