"""Evaluates trees of `expressions` at points, exactly or to many digits.

Rational values are exact fractions, others have many digits. Every step is
bounded: a tree beyond the bounds raises expressions.TooLarge, before anything
large is computed.
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
_ONE = ('number', fractions.Fraction(1))

LOCK = threading.RLock()  # mpmath's precision is global state


@functools.cache
def context():
  """The one that all values are computed in."""
  import mpmath  # slow to import
  return mpmath.MPContext()


class Values:
  """Evaluates trees at one kind of points.

  cancelled: a sum was far smaller than its terms. absorbed: a term was too
  small to change the digits of its sum. rounded: a fraction was too long to
  stay exact.
  """

  def __init__(self, points, digits):
    self.points, self.digits, self.factorials = points, digits, 0
    self.cancelled = self.absorbed = self.rounded = False
    self.context = context()
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
    self.absorbed |= are_exact(value) and _bits(value) > 3 * self.digits
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
    if are_exact(total):
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
    return pair if are_exact(*pair) else map(self.real, pair)

  def product(self, *trees):
    return operator.mul(*self.pair(*trees))

  def quotient(self, *trees):
    return operator.truediv(*self.pair(*trees))

  def power(self, base, exponent):
    base, exponent = self.of(base), self.of(exponent)
    if are_exact(base, exponent) and exponent.denominator == 1 and (
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
    if self.factorials > MAX_FACTORIALS or not all(
        abs(value) <= MAX_FACTORIAL for value in values):
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
    if not are_exact(value):
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


def are_exact(*values) -> bool:
  """Whether all are fractions."""
  return all(isinstance(value, fractions.Fraction) for value in values)


def _are_integers(*values):
  return are_exact(*values) and all(value.denominator == 1 for value in values)


def _bits(value):
  return max(value.numerator.bit_length(), value.denominator.bit_length())
