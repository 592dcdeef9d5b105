r"""Reads units: `5.4\text{ cents}`, `12 cm^2`, `50\mathrm{~km}/h`."""

import fractions
import functools
import re

# Name without plural s -> (dimension, factor).
_UNITS = {
    name: (dimension, fractions.Fraction(factor))
    for dimension, names in {
        'length': {'mm millimeter millimetre': '1/1000',
                   'cm centimeter centimetre': '1/100',
                   'dm decimeter': '1/10', 'm meter metre': 1,
                   'km kilometer kilometre': 1000,
                   'in inch inche': '254/10000', 'ft foot feet': '3048/10000',
                   'yd yard': '9144/10000', 'mi mile': '1609344/1000'},
        'time': {'s sec second': 1, 'min minute': 60, 'h hr hour': 3600,
                 'day': 86400, 'week': 604800},
        'mass': {'g gram': 1, 'kg kilogram': 1000, 'mg milligram': '1/1000'},
        'money': {'cent': '1/100', 'dollar usd': 1},
        'euro': {'euro eur': 1}, 'rupee': {'rupee': 1}, 'yen': {'yen': 1},
        'pound': {'pound': 1}, 'angle': {'degree deg': 1},
        'share': {'% percent': 1}}.items()
    for joined, factor in names.items() for name in joined.split()}
_TEXT = re.compile(
    r'^(?P<rest>.*?[^\s\\])\s*\\(?:text|mathrm|mathbf|textbf|mbox|textrm|rm)\s*'
    r'\{(?P<unit>(?:[a-zA-Z~ .,/%\'()-]|\^\s*-?\d|\\[,%~ ])*)\}'
    r'(?P<tail>(?:\s*/\s*(?:\\(?:text|mathrm)\s*)?\{?[\s~]*[a-zA-Z]+\s*\}?)?'
    r'(?:\s*\^\s*\{?-?[1-4]\}?)?)$', re.DOTALL)
_PLAIN = re.compile(
    r'^(?P<rest>.*[\d})!])\s*(?P<unit>[a-zA-Z][a-zA-Z ./^\d]*)$', re.DOTALL)
_FACTOR = re.compile(r'(square|sq|cubic)?([a-z%]+)\^?(-?\d|)')
_POWERS = {'square': 2, 'sq': 2, 'cubic': 3}

Unit = tuple[tuple[tuple[str, int], ...], fractions.Fraction]


def split(text: str) -> tuple[str, Unit | None]:
  r"""Splits off the unit: (the text before it, its Unit or None).

  Unknown units are removed only if they are written in `\text{}`.
  """
  if match := _TEXT.match(text):
    unit = read(match['unit'] + match['tail'])
    if unit or '/' not in match['tail'] or '\\' in match['tail']:
      return match['rest'], unit  # a letter after `/` may be a variable
  match = _PLAIN.match(text)
  if match and len(match['unit']) > 1 and (
      read(match['unit']) or match['unit'].endswith(('unit', 'units'))):
    return match['rest'], read(match['unit'])
  return text, None


@functools.lru_cache(4096)
def read(text: str) -> Unit | None:
  """Reads `km/h`, `cm^2`, `square feet`: (dimensions, factor), else None."""
  text = re.sub(r'\\(?:text|mathrm)|[{}$\s~]|\\circ|\\|\.', '', (
      text.replace('^\\circ', 'degree').replace('^{\\circ}', 'degree')
      .replace('per ', '/'))).lower()
  text = {'mph': 'mi/h', 'kph': 'km/h'}.get(text, text)
  dimensions, factor = {}, fractions.Fraction(1)
  for index, part in enumerate(text.split('/')):
    match = _FACTOR.fullmatch(part)
    name = match and next((n for n in (match[2], match[2].removesuffix('s'))
                           if n in _UNITS), None)
    if not name:
      return None
    power = int(match[3] or _POWERS.get(match[1], 1)) * (-1 if index else 1)
    dimension, size = _UNITS[name]
    dimensions[dimension] = dimensions.get(dimension, 0) + power
    factor *= size ** power
  return tuple(sorted(dimensions.items())), factor
