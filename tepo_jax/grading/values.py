"""Compares trees of `expressions` by their values.

Rational values are exact fractions, others have many digits. Variables take
values derived from their names. Every step is bounded: a tree beyond the
bounds raises expressions.TooLarge, before anything large is computed.

Values count as equal if they agree to 35 significant digits (70 % of DIGITS):
`2^{10^{-40}}` is 1.
"""

import builtins
import fractions
import functools
import math
import operator
import threading
import zlib

from tepo_jax.grading import expressions

MAX_BITS = 40_000  # of an exact fraction; longer ones are rounded
MAX_FACTORIAL = 5000  # in factorials and binomials
MAX_FACTORIALS = 16  # in one value
MAX_MAGNITUDE = 1 << 40  # of exponents and of logarithms of values
DIGITS, MANY_DIGITS, MOST_DIGITS = 50, 400, 3000
_MIXED_POINTS = tuple(f'mixed {i}' for i in range(12))
_STEP_POINTS = (*(f'small {i}' for i in range(13)),  # all of 1 to 13
                *(f'large {i}' for i in range(1, 9)))

_ONE = ('number', fractions.Fraction(1))


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


@functools.lru_cache(65536)
def _has_steps(tree):
  """Whether it has a floor, a ceiling or (-1)^n."""
  return (tree[0] == 'call' and tree[1] in ('floor', 'ceil')
          or tree[0] == 'power' and tree[1][0] == 'negative'
          or any(map(_has_steps, expressions.subtrees(tree))))


def _agree(first, second, points, if_real=False):
  """Whether they agree at these points, as far as their values are reliable, and
  with `if_real` only where both are real."""
  try:
    with _LOCK:
      values = _Values(points, DIGITS)
      a, b = values.of(first), values.of(second)
      return _close(a, b, DIGITS) or values.cancelled or if_real and any(
          values.context.im(values.real(value)) for value in (a, b))
  except expressions.Unreadable:  # e.g. a factorial
    return True


def _is_real(tree, points):
  with _LOCK:
    try:
      values = _Values(points, DIGITS)
      return not values.context.im(values.real(values.of(tree)))
    except expressions.Unreadable:  # e.g. the floor of a complex number
      return False


def _are_same_integers(first, second):
  return all(_same_at(first, second, p) for p in ('whole', 'bigger'))


def proportional(first: tuple, second: tuple) -> bool:
  """Whether first / second is the same nonzero value at several points."""
  with _LOCK:
    ratios = [_Values(points, DIGITS).of(('quotient', first, second))
              for points in ('positive', 'other', 'negative')]
    if any(ratio == 0 or _is_infinite(ratio) for ratio in ratios):
      raise expressions.Unreadable('0 or infinite')
    return all(_close(ratios[0], ratio, DIGITS) for ratio in ratios)


def is_within(first: tuple, second: tuple,
              absolute: fractions.Fraction = fractions.Fraction(0),
              relative: fractions.Fraction = fractions.Fraction(0)) -> bool:
  """|first - second| <= absolute + relative |first|, for finite constants."""
  if expressions.infinity(first) != 0 or expressions.infinity(second) != 0:
    return False
  with _LOCK:
    values = _Values('constant', DIGITS)
    a, b = values.of(first), values.of(second)
    if not _are_exact(a, b):
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
  with _LOCK:
    value = _Values('constant', DIGITS).of(tree)
    return value if _are_exact(value) else None


def order(tree: tuple):
  """A key by which real constants can be sorted."""
  with _LOCK:
    values = _Values('constant', DIGITS)
    return values.context.re(values.real(values.of(tree)))


def fingerprint(tree: tuple) -> str:
  """Writes out digits of the value, or of values at points of variables."""
  points = (('positive', 'negative') if expressions.symbols(tree)
            else ('constant',))
  with _LOCK:
    return ' '.join(_shown(_Values(p, DIGITS), tree) for p in points)


def _shown(values, tree):
  value, context = values.of(tree), values.context
  if _are_exact(value):
    return f'{value.numerator:x}/{value.denominator:x}'
  if values.cancelled:
    value = context.chop(value, context.mpf(10) ** -30)
  if context.isinf(value):
    return str(value)
  parts = context.re(value), context.im(value)
  if context.mag(value) <= MAX_BITS and value == context.nint(parts[0]):
    return f'{int(parts[0]):x}/1'
  return '+'.join(context.nstr(
      part if abs(part) > abs(value) / 10**30 else 0 * part, 40)
                  for part in parts)


def _same_at(first, second, points):
  with _LOCK:
    gap = None
    for digits in (DIGITS, MANY_DIGITS, MOST_DIGITS):
      values = _Values(points, digits)
      a, b = values.of(first), values.of(second)
      is_close = _close(a, b, digits)
      if is_close and values.rounded:
        break
      # A cancelled sum may be all rounding error; an absorbed term may differ.
      is_unsure = values.absorbed if is_close else values.cancelled
      if _are_exact(a, b) or _is_infinite(a) or _is_infinite(b) or (
          not is_unsure):
        return is_close
      a, b = values.real(a), values.real(b)
      previous, gap = gap, abs(a - b)
      if is_close or previous is None:
        continue
      accuracy = values.real(10) ** -DIGITS
      if gap > previous * accuracy**2:  # not rounding error: it stays
        return False
      # Rounding error may be large and shrink; only a small gap is equality.
      if gap <= accuracy * max(min(abs(a), abs(b)), accuracy):
        return True
    raise expressions.Unreadable('too large')


def _close(a, b, digits):
  """Whether a and b agree but for the last digits."""
  if _are_exact(a, b):
    return a == b
  context = _context()
  a, b = context.convert(a), context.convert(b)
  if _is_infinite(a) or _is_infinite(b):
    return bool(a == b)
  tiny = context.mpf(10) ** (-7 * digits // 10)
  return bool(abs(a - b) <= tiny * max(abs(a), abs(b)))


def _is_infinite(value):
  """Infinities equal only themselves: any number is relatively close to one."""
  return bool(_context().isinf(_context().convert(value)))


_LOCK = threading.RLock()  # mpmath's precision is global state


@functools.cache
def _context():
  import mpmath  # slow to import
  return mpmath.MPContext()


class _Values:
  """Evaluates trees at one kind of points.

  cancelled: a sum was far smaller than its terms. absorbed: a term was too
  small to change the digits of its sum. rounded: a fraction was too long to
  stay exact.
  """

  def __init__(self, points, digits):
    self.points, self.digits, self.factorials = points, digits, 0
    self.cancelled = self.absorbed = self.rounded = False
    self.context = _context()
    self.context.dps = digits + 10
    self.huge = self.context.mpf(10) ** (digits // 6)

  def of(self, tree):
    try:
      value = getattr(self, tree[0])(*tree[1:])
    except ZeroDivisionError as error:
      raise expressions.Undefined('1/0') from error
    except expressions.TooLarge:
      raise
    except (ArithmeticError, ValueError, TypeError, RecursionError) as error:
      raise expressions.Unreadable(str(error)) from error
    if isinstance(value, fractions.Fraction):
      if _bits(value) <= MAX_BITS:
        return value
      self.rounded, value = True, self.context.convert(value)
    if self.context.isnan(value):
      raise expressions.Unreadable('undefined')
    return value

  def real(self, value):
    """Converts to an mpmath number, real or complex."""
    self.absorbed |= _are_exact(value) and _bits(value) > 3 * self.digits
    return self.context.convert(value)

  def number(self, value):
    return value

  decimal = number

  def constant(self, name):
    return {'pi': +self.context.pi, 'e': +self.context.e,
            'i': self.context.j, 'inf': self.context.inf}[name]

  def symbol(self, name):
    code = zlib.crc32(f'{self.points} {name}'.encode())
    if self.points in ('whole', 'bigger'):
      return fractions.Fraction(
          3 + code % (9 if self.points == 'whole' else 90))
    kind, _, index = self.points.partition(' ')
    if kind == 'small':
      code = zlib.crc32(name.encode())
      return fractions.Fraction(
          1 + (code + int(index) * (1 + code // 13 % 12)) % 13)
    if kind == 'large':
      return fractions.Fraction(10 + code % 10 ** int(index))
    size = 1 + fractions.Fraction(code % 991 + 1, 997)
    if kind == 'mixed':  # Two names differ in a bit; odd points change all signs.
      bit = zlib.crc32(name.encode()) >> int(index) // 2 * 3 & 1
      return 8 * (size if (bit + int(index)) % 2 else -size)
    return -size if self.points == 'negative' else size

  def loose(self, tree):
    return self.of(tree)

  def opaque(self, name, tree):
    digits = self.context.nstr(self.real(self.of(tree)), 25)
    return self.symbol(f'{name}({digits})')

  def sum(self, first, second):
    first, second = self.pair(first, second)
    total = first + second
    if _are_exact(total):
      return total
    self.cancelled |= bool(abs(total) * 10**20 <= abs(first))
    self.absorbed |= bool(
        0 < min(abs(first), abs(second)) * self.huge < abs(total))
    return total

  def negative(self, tree):
    return -self.of(tree)

  def pair(self, first, second):
    """Evaluates both: two exact fractions or two mpmath numbers."""
    pair = self.of(first), self.of(second)
    return pair if _are_exact(*pair) else map(self.real, pair)

  def product(self, *trees):
    return operator.mul(*self.pair(*trees))

  def quotient(self, *trees):
    return operator.truediv(*self.pair(*trees))

  def power(self, base, exponent):
    base, exponent = self.of(base), self.of(exponent)
    if _are_exact(base, exponent) and exponent.denominator == 1 and (
        _bits(base) * abs(exponent) <= MAX_BITS):
      return base ** int(exponent)
    if (isinstance(exponent, fractions.Fraction) and exponent.denominator % 2
        and not isinstance(base, self.context.mpc) and base < 0):
      size = self.any_power(-base, exponent)  # the real root
      return -size if exponent.numerator % 2 else size
    return self.any_power(base, exponent)

  def any_power(self, base, exponent):
    base, exponent = self.real(base), self.real(exponent)
    if base == 0:
      if self.context.re(exponent) <= 0:
        raise expressions.Unreadable('0^0')
      return base
    self.bound(exponent * self.context.log(base))
    self.bound(exponent)
    return base ** exponent

  def bound(self, value):
    if not abs(value) <= MAX_MAGNITUDE:
      raise self.too_large()

  def too_large(self):
    """At a point of variables the tree may be large, its function is not."""
    return (expressions.TooLarge if self.points == 'constant'
            else expressions.Unreadable)('too large')

  def bound_factorial(self, *values):
    """Counts a factorial, as four if it is of no integer, which takes longer; with
    MOST_DIGITS that takes seconds and is refused."""
    if not _are_integers(*values) and self.digits > MANY_DIGITS:
      raise expressions.Unreadable('takes long')
    self.factorials += 1 if _are_integers(*values) else 4
    if self.factorials > MAX_FACTORIALS or not (
        max(map(abs, values)) <= MAX_FACTORIAL):
      raise self.too_large()

  def root(self, tree, degree):
    if degree == expressions.TWO:
      return self.context.sqrt(self.real(self.of(tree)))
    return self.power(tree, ('quotient', _ONE, degree))

  def choose(self, n, k):
    n, k = self.of(n), self.of(k)
    self.bound_factorial(n, k)
    if _are_integers(n, k) and n >= 0:
      return fractions.Fraction(math.comb(int(n), int(k)) if k >= 0 else 0)
    return self.context.binomial(self.real(n), self.real(k))

  def fold(self, name, *trees):
    values = [self.of(tree) for tree in trees]
    if name in ('max', 'min'):
      return getattr(builtins, name)(
          values, key=lambda value: self.context.re(self.real(value)))
    if not _are_integers(*values):
      raise expressions.Unreadable(name)
    return fractions.Fraction(getattr(math, name)(*map(int, values)))

  def remainder(self, *trees):
    first, second = self.pair(*trees)
    if not _are_integers(first, second):
      raise expressions.Unreadable('mod')
    return first % second

  def call(self, name, tree):
    value = self.of(tree)
    if name == 'abs':
      return abs(value)
    if name in ('re', 'im', 'conj'):
      return getattr(self.context, name)(self.real(value))
    if name in ('floor', 'ceil'):
      if isinstance(value, self.context.mpc):
        raise expressions.Unreadable('no order')
      return self.step(getattr(math, name), value)
    if name == 'factorial':
      return self.factorial(value)
    value = self.real(value)
    self.bound(value)
    return getattr(self.context, name)(value)

  def step(self, function, value):
    """An exact floor or ceiling, unless the value is too large for that."""
    if not _are_exact(value):
      nearest = self.context.nint(value)
      if abs(value) >= self.huge ** 3:
        self.cancelled = True  # Its last digits are unknown.
        return nearest
      if abs(value - nearest) * self.huge ** 2 < 1:
        value = nearest  # e.g. of the root of a square
    return fractions.Fraction(function(value))

  def factorial(self, value):
    self.bound_factorial(value)
    if _are_integers(value):
      return fractions.Fraction(math.factorial(int(value)))
    return self.context.gamma(self.real(value) + 1)


def _are_exact(*values):
  return all(isinstance(value, fractions.Fraction) for value in values)


def _are_integers(*values):
  return _are_exact(*values) and all(value.denominator == 1 for value in values)


def _bits(value):
  return max(value.numerator.bit_length(), value.denominator.bit_length())
