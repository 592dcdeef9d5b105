r"""Reads units: `5.4\text{ cents}`, `12 cm^2`, `50\mathrm{~km}/h`, `12 eggs`.

Where both answers carry a unit, the units must agree: known ones are
converted, and unknown words (eggs, pears) each are a dimension of their own.
Where one of the two has none, the unit is ignored.
"""

import fractions
import functools
import re

from tepo_jax.grading import expressions

# Names -> (factor, base units); a name may end in s. Case counts for names of
# one or two letters (kN, mg, Mg); others are read in lower case.
_TABLE = {
    'm meter metre': (1, 'length'), 'mm millimeter millimetre': ('1/1000', 'm'),
    'cm centimeter centimetre': ('1/100', 'm'), 'dm decimeter': ('1/10', 'm'),
    'km kilometer kilometre': (1000, 'm'), 'in inch inche': ('254/10000', 'm'),
    'ft foot feet': ('3048/10000', 'm'), 'yd yard': ('9144/10000', 'm'),
    'mi mile': ('1609344/1000', 'm'), 'nm nanometer': ('1/1000000000', 'm'),
    's sec second': (1, 'time'), 'min minute': (60, 's'),
    'h hr hour': (3600, 's'), 'ms millisecond': ('1/1000', 's'),
    'day': (86400, 's'), 'week': (604800, 's'),
    'month': (1, 'calendar'), 'year yr': (12, 'month'),
    'decade': (120, 'month'),
    'g gram': (1, 'mass'), 'kg kilogram': (1000, 'g'),
    'mg milligram': ('1/1000', 'g'), 'lb pound': ('45359237/100000', 'g'),
    'oz ounce': ('45359237/1600000', 'g'), 'ton tonne': (1000000, 'g'),
    'l L liter litre': ('1/1000', 'm^3'), 'ml mL milliliter': (
        '1/1000000', 'm^3'), 'gal gallon': ('3785411784/1000000000000', 'm^3'),
    'N newton': (1000, 'g m/s^2'), 'kN': (1000, 'N'), 'J joule': (1, 'N m'),
    'kJ kilojoule': (1000, 'J'), 'W watt': (1, 'J/s'), 'kW kilowatt': (
        1000, 'W'), 'Pa pascal': (1, 'N/m^2'), 'kPa': (1000, 'Pa'),
    'Hz hertz': (1, '1/s'), 'kHz': (1000, 'Hz'), 'A amp ampere': (1, 'current'),
    'V volt': (1, 'J/A s'), 'K kelvin': (1, 'temperature'), 'mol mole': (
        1, 'amount'), 'erg': ('1/10000000', 'J'), 'dyne': ('1/100000', 'N'),
    'mph': (1, 'mi/h'), 'kph kmh': (1, 'km/h'),
    'cent': ('1/100', 'dollar'), 'dollar usd buck': (1, 'money'),
    'degree deg': (1, 'degree'), 'radian rad': (1, 'radian'),
    '% percent pct percentage': (1, '%')}
_NAMES = {name: value for names, value in _TABLE.items()
          for name in names.split()}
# They say only that a number counts something.
_VAGUE = frozenset(('unit', 'units', 'square units', 'cubic units', 'sq units',
                    'square unit', 'cubic unit', 'units squared',
                    'units cubed'))
_TEXT = re.compile(
    r'^(?P<rest>.*?[^\s\\])\s*\\(?:text|mathbf|rm)\s*'
    r'\{(?P<unit>(?:[^\W\d_]|[~ .,/%\'()-]|\^\s*-?\d|\\[,%~ ]|\\cdot )*)\}'
    # Each part can match in one way only: two ways would be 2^n for n parts.
    r'(?P<tail>(?:\s*(?:/|\\cdot|\s)\s*\\(?:text|mathbf)\s*\{[\s~]*[a-zA-Z]+'
    r'\s*\}|\s*/\s*\{?[\s~]*[a-zA-Z]+(?:\s*\})?'
    r'|\s*\^\s*\{?-?\d\}?)*)$', re.DOTALL)
_PLAIN = re.compile(
    r'^(?P<rest>.*[\d})!])\s*(?P<unit>[a-zA-Z][a-zA-Z ./^*\d-]*)$', re.DOTALL)
# A number, a space and words: 12 eggs. No function or operator.
_WORDS = re.compile(
    r'^(?P<rest>[-+]?[\d.,/]*\d|.*\}) (?P<unit>(?!(?:mod|choose|pi|times|over|or'
    r'|and|if|for|when|base|plus|minus|a?(?:sin|cos|tan)|sqrt|log|ln|exp|is|to'
    r'|not|no|with)\b)[a-z]{3,}(?: [a-z]+|-[a-z]{3,}){0,3})$', re.DOTALL)
# What a variable counts, 2n ways: a plural, and no sentence such as "n is odd".
_COUNTED = re.compile(
    r'(?!.*\b(?:is|are|be|must|has|have|such|where|exists?|if|for|when|unless'
    r'|always|divides|equals|mod|over|times|plus|minus|and|or|not|no|with)\b)'
    r'(?:.*[a-z]s|.*\b(?:people|children|men|women|total))')
# What says that the number is no answer.
_DENIAL = re.compile(r"\b(?:no|not|wrong|incorrect|false|\w+n't)\b")
_FACTOR = re.compile(
    r'(square |sq |cubic )?([^\W\d_]+|%)(?:\^?(-?\d)| (squared|cubed))?')
_POWERS = {'square ': 2, 'sq ': 2, 'cubic ': 3, 'squared': 2, 'cubed': 3}
# A product of two letters, such as g h, may be one of variables.
_LETTERS = re.compile(r'[a-zA-Z](?: [a-zA-Z])*')
Unit = tuple[tuple[tuple[str, int], ...], fractions.Fraction]
DEGREES = ((('degree', 1),), fractions.Fraction(1))
PERCENT = ((('%', 1),), fractions.Fraction(1))
RADIANS = ((('radian', 1),), fractions.Fraction(1))


def split(text: str) -> tuple[str, Unit | None]:
  r"""Splits off the unit: (the text before it, its Unit or None).

  After a number any `\text{}` is a unit; after a variable, what is known or
  counted. Plain text is a unit if all its words are known, or if it follows a
  number and a space: a letter after a number (10m) may be a variable.
  """
  if '{' in text and (match := _TEXT.match(text)):
    words = _clean(match['unit'])
    is_counted = words in _VAGUE or _COUNTED.fullmatch(words)
    if _DENIAL.search(words) or not is_counted and _known(words) is None and (
        _has_variable(match['rest'])):
      return text, None  # n is odd
    tail = match['tail']
    if '\\' in tail or '/' not in tail or is_known(match['unit'] + tail):
      return match['rest'], read(match['unit'] + tail)
    return text, None  # a letter after `/` may be a variable
  match = _PLAIN.match(text)
  if match and len(match['unit']) > 1 and (
      is_known(match['unit']) or match['unit'] in _VAGUE):
    return match['rest'], read(match['unit'])
  if (match := _WORDS.match(text)) and not _DENIAL.search(match['unit']):
    return match['rest'], read(match['unit'])
  return text, None


def _has_variable(text):
  try:
    return bool(expressions.symbols(expressions.parse(text)))
  except expressions.Unreadable:
    return False


def _clean(text):
  text = re.sub(r'\\(?:text|mathbf)|[{}$()]|\\[,%]|[.,]', lambda match: (
      '%' if match[0] == '\\%' else ' '), text)
  text = re.sub(r'\s*\^\s*', '^', re.sub(r'~|\\cdot', ' ', text))
  return ' '.join(re.sub(r'\bper\b', '/', text).replace('*', ' ').split())


def is_letter(name: str) -> bool:
  """Whether a letter after a number may be a unit: 10m."""
  return len(name) == 1 and name in _NAMES


def is_known(text: str) -> bool:
  """Whether each word is the name of a known unit."""
  text = _clean(text)
  return _known(text) is not None and not _LETTERS.fullmatch(text)


@functools.lru_cache(4096)
def read(text: str) -> Unit | None:
  """Reads `km/h`, `cm^2`, `square feet`, `eggs`: (dimensions, factor); None if
  there is no word, or one that says nothing ("units")."""
  text = _clean(text)
  if not text.strip(' /^-') or text.lower() in _VAGUE:
    return None
  known = _known(text)
  if known is not None:
    return known
  word = text.lower()
  word = word.removesuffix('s') if len(word) > 3 else word
  # The space keeps 5 lengths from being 5 m: no known dimension has one.
  return ((f'{word} ', 1),), fractions.Fraction(1)


def _known(text):
  """Multiplies the known units of a product or quotient; else None."""
  powers, factor = {}, fractions.Fraction(1)
  for index, part in enumerate(text.split('/')):
    while part := part.strip():
      match = _FACTOR.match(part)
      value = _find(match[2]) if match else None
      if part == '1':
        break
      if value is None:
        return None
      power = int(match[3] or _POWERS.get(match[1], 0)
                  or _POWERS.get(match[4], 1)) * (-1 if index else 1)
      (dimensions, size), part = value, part[match.end():]
      for name, count in dimensions:
        powers[name] = powers.get(name, 0) + count * power
      factor *= size ** power
  return tuple(sorted(item for item in powers.items() if item[1])), factor


@functools.lru_cache(4096)
def _find(name):
  spellings = [name, name.removesuffix('s')]
  if len(name) > 1:
    spellings += [spelling.lower() for spelling in spellings]
  known = next((s for s in spellings if s in _NAMES), None)
  if known is None:
    return None
  size, base = _NAMES[known]
  if not re.search(r'[ /^]', base) and base not in _NAMES or base == known:
    return ((base, 1),), fractions.Fraction(size)
  dimensions, factor = _known(base)
  return dimensions, fractions.Fraction(size) * factor
