"""Renders one self-contained HTML page, which needs no network.

Text from models, data sets and configs is escaped here, and set as textContent
by the scripts.
"""

from collections.abc import Iterable, Mapping, Sequence
import html
import json
import pathlib
from typing import Any

from tepo_jax import errors

_WEB = pathlib.Path(__file__).parent / 'web'
_PAGE = (_WEB / 'page.html').read_text('utf-8')
# The elements that inspector.js fills.
INSPECTOR = (_WEB / 'inspector.html').read_text('utf-8')

_FIGURES = """
<div class="controls" id="legend"></div>
<p class="caption">Point at a figure, or focus it and use <kbd>←</kbd>
<kbd>→</kbd>, to read what was measured; drag to zoom. Faint lines are as
measured; bold ones are means of the last steps, as many as chosen above.
Evaluations are as measured. {bands} The folder of this page has the figures as
PNG and SVG.</p>
<div class="grid">{cards}</div>
<details id="machine"><summary>The machine: speed, memory, files,
compilations</summary><div class="grid">{machine}</div></details>
"""

_CARD = """<div class="card" id="panel-{name}">
<h3>{title}{unit}</h3>
<div class="holder"></div>
<div class="readout"></div>
</div>
"""


class Html(str):
  """Text that is HTML already."""


def render(title: str, intro: str, sections: Sequence[tuple[str, str]],
           data: dict[str, Any]) -> str:
  """Renders the page.

  Args:
    title: plain text. intro: HTML below it.
    sections: (heading, HTML) in order.
    data: for the scripts: `panels`, `labels`, `windows`, `inspectors`.
  """
  links = ''.join(f'<a href="#s{i}">{text(heading)}</a>'
                  for i, (heading, _) in enumerate(sections))
  body = ''.join(
      f'<section id="s{i}"><h2>{text(heading)}</h2>{content}</section>'
      for i, (heading, content) in enumerate(sections))
  style, *scripts = ((_WEB / name).read_text('utf-8') for name in (
      'page.css', 'view.js', 'charts.js', 'inspector.js', 'tables.js'))
  # JSON that cannot end its script element.
  embedded = json.dumps(
      _printable(data), allow_nan=False, ensure_ascii=False).replace(
          '<', '\\u003c').replace('\u2028', '\\u2028').replace(
              '\u2029', '\\u2029')
  return _PAGE.format(
      title=text(title), style=style,
      scripts=''.join(f'<script>{script}</script>\n' for script in scripts),
      body=f'<h1>{text(title)}</h1>{intro}<nav>{links}</nav>{body}',
      data=embedded)


def text(value: Any) -> str:
  """Escapes for HTML; returns `Html` as it is."""
  return value if isinstance(value, Html) else html.escape(
      errors.printable(str(value)))


def _printable(data):
  """The data with escaped control characters in its texts."""
  if isinstance(data, str):
    return errors.printable(data)
  if isinstance(data, Mapping):
    return {name: _printable(value) for name, value in data.items()}
  if isinstance(data, list | tuple):
    return list(map(_printable, data))
  return data


def link(target: str, label: str) -> Html:
  """Returns a link."""
  return Html(f'<a href="{text(target)}">{text(label)}</a>')


def table(head: Sequence[str], rows: Iterable[Sequence[Any]],
          numbers: Iterable[int] = ()) -> str:
  """Returns a table of text; the columns in `numbers` are right-aligned.

  tables.js makes it sortable.
  """
  right = set(numbers)

  def cells(row, tag):
    return ''.join(
        f'<{tag}{" class=number" if i in right else ""}>{text(value)}</{tag}>'
        for i, value in enumerate(row))

  body = ''.join(f'<tr>{cells(row, "td")}</tr>' for row in rows)
  return ('<div class="scroll" tabindex="0"><table>'
          f'<thead><tr>{cells(head, "th")}</tr></thead>'
          f'<tbody>{body}</tbody></table></div>')


def facts(rows: Iterable[tuple[str, Any]]) -> str:
  """Returns a list of names and values."""
  return '<dl>' + ''.join(f'<dt>{text(name)}</dt><dd>{text(value)}</dd>'
                          for name, value in rows) + '</dl>'


def figures(panels: Sequence[dict[str, Any]], bands: str) -> str:
  """Returns the elements that charts.js fills. `bands` describes them."""
  cards = [(p['is_machine'], _CARD.format(
      name=text(p['name']), title=text(p['title']),
      unit=text(f', {p["unit"]}' if p['unit'] else ''))) for p in panels]
  learning, machine = (''.join(card for is_machine, card in cards
                               if is_machine == which)
                       for which in (False, True))
  return _FIGURES.format(cards=learning, machine=machine, bands=text(bands))


def heat_map(names: Sequence[str], matrix: Sequence[Sequence[float]]) -> str:
  """Returns a coloured table of cosines, −1 … 1."""
  head = ''.join(f'<th>{text(name)}</th>' for name in names)
  rows = ''.join(f'<tr><th>{text(name)}</th>' + ''.join(
      f'<td style="background: rgba(var(--{"up" if value > 0 else "down"}), '
      f'{0.75 * abs(value):.3f})">{value:.2f}</td>' for value in row) + '</tr>'
                 for name, row in zip(names, matrix))
  return ('<div class="scroll" tabindex="0"><table class="heat">'
          f'<thead><tr><td></td>{head}</tr></thead>'
          f'<tbody>{rows}</tbody></table></div>')
