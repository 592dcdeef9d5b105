r"""Parses closed forms such as `\frac{3\sqrt2}{2}` or `n(n+1)/2` into trees.

Reads LaTeX and plain notation. Every step is bounded, so that the training
process may parse model text. Text that is not understood raises Unreadable and
is left to math-verify; text beyond a bound raises TooLarge and is not, because
computing it would take math-verify longer still.

  tree = (operation, *arguments): ('number' | 'decimal', Fraction),
  ('constant', 'pi' | 'e' | 'i' | 'inf'), ('symbol', name),
  ('sum' | 'product' | 'power' | 'quotient', tree, tree), ('negative', tree),
  ('call', function, tree), ('root', tree, degree), ('choose', tree, tree),
  ('fold', 'gcd' | 'lcm' | 'max' | 'min', *trees), ('remainder', tree, tree),
  ('opaque', name, tree): an unknown function's value;
  ('loose', tree): a quotient with a factor after it, `1/2x`.
"""

from collections.abc import Iterator
import fractions
import functools
import re

MAX_DEPTH = 40
MAX_TOKENS = 600

_MPMATH = (
    'sin cos tan cot sec csc sinh cosh tanh coth sech csch asin acos atan acot '
    'asec acsc asinh acosh atanh acoth asech acsch exp ln floor ceil factorial '
    'abs re im conj').split()
# Spelling -> function of evaluation.Values. arcsin, arsinh and the like follow.
_FUNCTIONS = {name: name for name in _MPMATH} | {
    'log': 'ln', 'lg': 'log10', 'Re': 're', 'Im': 'im', 'ctg': 'cot',
    'tg': 'tan', 'cosec': 'csc'}
_FUNCTIONS |= {f'{prefix}{name[1:]}': name for name in _MPMATH
               for prefix in ('arc', 'ar')[:1 + name.endswith('h')]
               if name[0] == 'a' and name != 'abs'}
_INVERSES = {name[1:]: name for name in _MPMATH if name[0] == 'a'}
_FOLDS = frozenset(('gcd', 'lcm', 'max', 'min'))
_NAMES = sorted(
    {*_FUNCTIONS, *_FOLDS} - {'re', 'im', 'conj', 'Re', 'Im', 'tg'}, key=len,
    reverse=True)
_TOKEN = re.compile(
    r'\s*(?:(\d+\.?\d*|\.\d+)|(\\[a-zA-Z]+|\\.)'
    rf'|({"|".join(_NAMES)}|sqrt|pi|mod|alpha|beta|gamma|delta|theta'
    r'|lambda|omega|sigma|phi|rho|tau|mu)(?![a-zA-Z])|([a-zA-Z])|(\*\*|\S))')
_GREEK = frozenset(
    'alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota '
    'kappa lambda mu nu xi rho sigma tau upsilon phi varphi chi psi omega '
    'Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega hbar ell odot'.split())
_ACCENTS = frozenset(
    'dot ddot hat bar vec tilde overline mathbf mathbb mathcal mathrm text '
    'operatorname'.split())
_FENCES = {'(': ')', '[': ']', '{': '}', '\\lfloor': '\\rfloor',
           '\\lceil': '\\rceil', '|': '|'}
_ROUNDING = {'\\lfloor': 'floor', '\\lceil': 'ceil', '|': 'abs'}
_OPERATIONS = {'*': 'product', '\\cdot': 'product', '\\times': 'product',
               '/': 'quotient', '\\div': 'quotient',
               '\\bmod': 'remainder', '\\mod': 'remainder',
               'mod': 'remainder'}

TWO = ('number', fractions.Fraction(2))


class Unreadable(ValueError):
  """The text is no closed form known here."""


class TooLarge(Unreadable):
  """The text, or a number that it stands for, exceeds a bound."""


class Undefined(Unreadable):
  """The expression divides by zero."""


@functools.lru_cache(65536)
def parse(text: str) -> tuple:
  r"""Parses an expression without `=`, `,` or `\pm`, else Unreadable."""
  parser = _Parser(text)
  try:
    tree = parser.sum()
  except Unreadable:
    raise
  except (RecursionError, ValueError) as error:  # e.g. 5,000 digits
    raise TooLarge(text) from error
  if parser.token is not None:
    raise Unreadable(text)
  if _depth(tree) > MAX_DEPTH * 4:
    raise TooLarge(text)
  return tree


def _depth(tree):
  """Measures the depth without recursion."""
  depth, level = 0, [tree]
  while level:
    depth += 1
    level = [part for node in level for part in subtrees(node)]
  return depth


def subtrees(tree: tuple) -> Iterator[tuple]:
  """Yields the arguments that are trees."""
  return (part for part in tree[1:] if isinstance(part, tuple))


def symbols(tree: tuple) -> frozenset:
  """Returns the names of the variables."""
  if tree[0] == 'symbol':
    return frozenset(tree[1:])
  return frozenset().union(*map(symbols, subtrees(tree)))


def infinity(tree: tuple) -> int | None:
  """1 or -1 for a signed infinity, 0 for a tree without any, else None."""
  if tree == ('constant', 'inf'):
    return 1
  signs = set(map(infinity, subtrees(tree)))
  if tree[0] == 'negative' and None not in signs:
    return -signs.pop()
  return None if signs - {0} else 0


def has_decimal(tree: tuple) -> bool:
  """Whether any number in the tree has a decimal point."""
  return tree[0] == 'decimal' or any(map(has_decimal, subtrees(tree)))


def is_decimal(tree: tuple) -> bool:
  """Whether it is a decimal such as -2.5 or 8.7 * 10^8, not a formula."""
  if tree[0] == 'negative':
    return is_decimal(tree[1])
  if tree[0] == 'product':
    return is_decimal(tree[1]) and tree[2][:2] == (
        'power', ('number', fractions.Fraction(10)))
  return tree[0] == 'decimal'


def is_loose(tree: tuple) -> bool:
  """Whether the text has a second reading: `1/2x`."""
  return tree[0] == 'loose' or any(map(is_loose, subtrees(tree)))


class _Parser:
  """Parses by recursive descent; `token` is the next one, None at the end."""

  def __init__(self, text):
    self.tokens = [next(filter(None, groups))
                   for groups in _TOKEN.findall(text.strip())]
    self.tokens.reverse()
    self.depth, self.is_in_bars = 0, False
    if not self.tokens:
      raise Unreadable(text)
    if len(self.tokens) > MAX_TOKENS:
      raise TooLarge(text)

  @property
  def token(self):
    return self.tokens[-1] if self.tokens else None

  def take(self, wanted=None):
    if not self.tokens or wanted is not None and self.token != wanted:
      raise Unreadable(f'{wanted} expected')
    return self.tokens.pop()

  def sum(self):
    self.depth += 1
    if self.depth > MAX_DEPTH:
      raise TooLarge('too deep')
    tree = self.product()
    while self.token in ('+', '-'):
      sign = self.take()
      term = self.product()
      tree = ('sum', tree, term if sign == '+' else ('negative', term))
    self.depth -= 1
    return tree

  def product(self):
    tree, after_slash = self.signed(), False
    while True:
      if self.token in _OPERATIONS:
        operation = _OPERATIONS[self.take()]
        tree = operation, tree, self.signed()
        after_slash = operation == 'quotient'
      elif self.starts_factor():
        if tree[0] in ('number', 'decimal') and self.token[0] in '.0123456789':
          raise Unreadable('two numbers')
        tree = ('product', tree, self.power())
        tree = ('loose', tree) if after_slash else tree
      else:
        return tree

  def signed(self):
    negative = False
    while self.token in ('+', '-'):
      negative ^= self.take() == '-'
    tree = self.power()
    return ('negative', tree) if negative else tree

  def starts_factor(self):
    token = self.token
    return token is not None and (
        token[0].isalnum() and token not in _OPERATIONS
        or token[0] in '.([{' or token == '|' and not self.is_in_bars
        or token[0] == '\\' and token[1:].isalpha() and token not in (
            *_OPERATIONS, '\\rfloor', '\\rceil'))

  def power(self):
    tree = self.atom()
    while self.token == '!':
      self.take()
      tree = ('call', 'factorial', tree)
    if self.token in ('^', '**'):
      self.take()
      return ('power', tree, self.exponent())
    return tree

  def exponent(self):
    if self.token in ('+', '-'):
      negative = self.take() == '-'
      tree = self.power()
      return ('negative', tree) if negative else tree
    return self.group() if self.token == '{' else self.power()

  def group(self):
    """Parses a sum between fences."""
    opening, was_in_bars = self.take(), self.is_in_bars
    self.is_in_bars = opening == '|'
    tree = self.sum()
    self.take(_FENCES[opening])
    self.is_in_bars = was_in_bars
    return ('call', _ROUNDING[opening], tree) if opening in _ROUNDING else tree

  def argument(self):
    r"""Parses an argument of \frac, \sqrt, \binom: group, token or digit."""
    if self.token == '{':
      return self.group()
    token = self.take()
    if token.isdigit():
      if token[1:]:
        self.tokens.append(token[1:])
      return ('number', fractions.Fraction(token[0]))
    self.tokens.append(token)
    return self.atom()

  def atom(self):
    token = self.token
    if token is None:
      raise Unreadable('ends early')
    if token in _FENCES:
      return self.group()
    self.take()
    if token[0].isdigit() or token[0] == '.' and len(token) > 1:
      return self.number(token)
    name = token.lstrip('\\')
    if name in ('frac', 'dfrac', 'tfrac', 'cfrac'):
      return ('quotient', self.argument(), self.argument())
    if name in ('binom', 'dbinom', 'tbinom'):
      return ('choose', self.argument(), self.argument())
    if name == 'sqrt':
      if token == name and self.tokens and self.token[0].isdigit():  # sqrt13
        return ('root', ('number', fractions.Fraction(self.take())), TWO)
      degree = self.group() if self.token == '[' else TWO
      return ('root', self.argument(), degree)
    if name == 'pi' and self.token != '_':
      return ('constant', 'pi')
    if token == '\\infty':
      return ('constant', 'inf')
    if name in _FUNCTIONS and (token[0] == '\\' or name in _NAMES):
      return self.call(name)
    if name in _FOLDS:
      return self.fold(name)
    if token == '\\' + name and name in _ACCENTS:
      if name in ('overline', 'bar') and self.token == '{':
        return self.conjugate()
      inside = self.raw()
      if name in ('operatorname', 'mathrm', 'text'):
        if inside in _FUNCTIONS:
          return self.call(inside)
        if inside in _FOLDS:
          return self.fold(inside)
      return self.symbol(f'{name} {inside}')
    if len(name) == 1 and name.isalpha() or name in _GREEK or name == 'pi':
      return self.symbol(name)
    raise Unreadable(token)

  def number(self, token):
    r"""Parses a number, perhaps mixed: `2\frac{1}{3}`, `2 1/3`."""
    value = fractions.Fraction(token)
    if '.' in token:
      return ('decimal', value)
    if self.token in ('\\frac', '\\dfrac', '\\tfrac'):
      rest = list(self.tokens)
      tree = self.atom()
      above, below = tree[1], tree[2]
      if above[0] == below[0] == 'number' and 0 < above[1] < below[1]:
        return ('number', value + above[1] / below[1])
      self.tokens = rest
    above, slash, below = ([''] * 3 + self.tokens)[:-4:-1]
    if slash == '/' and above.isdigit() and below.isdigit() and (
        int(above) < int(below)):
      del self.tokens[-3:]
      value += fractions.Fraction(int(above), int(below))
    return ('number', value)

  def raw(self):
    """Takes the text of one braced argument or of one token."""
    if self.token != '{':
      return self.take()
    parts, depth = [], 0
    while not parts or depth:
      parts.append(self.take())
      depth += (parts[-1] == '{') - (parts[-1] == '}')
    return ''.join(parts[1:-1])

  def symbol(self, name):
    while self.token in ('_', "'"):
      name += self.take()
      if name[-1] == '_':
        name += self.raw()
    if name in ('e', 'i'):
      return ('constant', name)
    if self.token == '(' and len(self.tokens) > 2 and (
        self.tokens[-3] == ')' or name in 'fgFGP'):
      return ('opaque', name, self.group())
    return ('symbol', name)

  def fold(self, name):
    r"""Parses the arguments of `\max(1,2)` or `\gcd\{4,6\}`."""
    closing = {'(': ')', '\\{': '\\}'}[self.take()] if self.token in (
        '(', '\\{') else self.take('(')
    trees = [self.sum()]
    while self.token == ',':
      self.take()
      trees.append(self.sum())
    self.take(closing)
    return ('fold', name, *trees)

  def conjugate(self):
    r"""Parses `\overline{3+4i}`; of letters, a name such as \overline{AB}."""
    rest = list(self.tokens)
    name = self.raw()
    if not re.search(r'\d', name):
      return self.symbol(f'overline {name}')
    self.tokens = rest
    inside = self.group()
    if symbols(inside) or not re.search(r'i', name):
      raise Unreadable('\\overline')
    return ('call', 'conj', inside)

  def call(self, name):
    function, exponent = _FUNCTIONS[name], None
    if self.token == '_' and function == 'ln':
      self.take()
      base = self.argument()
      return ('quotient', self.call(name), ('call', 'ln', base))
    if self.token == '^':
      self.take()
      exponent = self.exponent()
      if exponent == ('negative', ('number', 1)) and function in _INVERSES:
        function, exponent = _INVERSES[function], None
    tree = ('call', function, self.call_argument())
    return tree if exponent is None else ('power', tree, exponent)

  def call_argument(self):
    r"""Parses `(x)`, `{x}`, or factors up to a sign or function: `\sin 2x`."""
    if self.token in ('(', '{', '['):
      return self.group()
    tree = self.signed()
    while self.starts_factor() and self.token.lstrip('\\') not in _FUNCTIONS:
      tree = ('product', tree, self.power())
    return tree
