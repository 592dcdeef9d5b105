"""One self-contained HTML page: no network, light and dark, wide and narrow.

Whatever came from a model, a data set or a config is text: escaped where HTML
is written here, set as textContent by the scripts.
"""

from collections.abc import Iterable, Sequence
import html
import json
import pathlib
from typing import Any

_WEB = pathlib.Path(__file__).parent / 'web'

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline';
  script-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
<script>{charts}</script>
<script>{inspector}</script>
</body>
</html>
"""

_INSPECTOR = """
<p>Every token is coloured by the chosen quantity; point at one, tap it, or
walk with the keys for its exact values. <span class="muted"
id="inspector-about"></span></p>
<div class="card" id="inspector" tabindex="0">
<div class="controls">
<select id="which" aria-label="run"></select>
<select id="quantity" aria-label="quantity"></select>
<select id="filter" aria-label="filter">
<option value="all">all groups</option>
<option value="mixed">mixed groups</option>
<option value="trained">trained on</option>
<option value="right">all right</option>
<option value="wrong">all wrong</option></select>
<select id="sort" aria-label="order">
<option value="order">in data order</option>
<option value="gap">largest sampler gap first</option>
<option value="entropy">largest entropy change first</option>
<option value="masked">most masked first</option>
<option value="reward">highest reward first</option></select>
<button type="button" id="previous">‹ previous</button>
<button type="button" id="next">next ›</button>
<span id="count" class="muted"></span>
</div>
<p class="caption"><span id="ramp"></span></p>
<div id="group"></div>
<p class="caption">Keys: <kbd>←</kbd> <kbd>→</kbd> token, <kbd>↑</kbd>
<kbd>↓</kbd> completion, <kbd>n</kbd> <kbd>p</kbd> group, <kbd>q</kbd>
quantity, <kbd>Esc</kbd> closes the values.</p>
</div>
<h3 style="margin-top: 1rem">Tokens most often masked</h3>
<p class="caption">In M after the step's updates, among the completions that
were trained on; count: how often the token occurs there.</p>
<p class="muted" id="masked-none">None, or not computed: that takes
--inspect.</p>
<div class="scroll"><table id="masked-table"><thead><tr><th>token</th>
<th class="number">id</th><th class="number">masked</th>
<th class="number">count</th><th class="number">share</th></tr></thead>
<tbody id="masked"></tbody></table></div>
<div class="tip" id="tip" role="status" hidden></div>
"""

_FIGURES = """
<div class="controls" id="legend"></div>
<p class="caption">Point at a figure, or focus it and use <kbd>←</kbd>
<kbd>→</kbd>, for its numbers. The same figures lie beside this page as PNG and
SVG.</p>
<div class="grid">{cards}</div>
"""

_CARD = """<div class="card" id="panel-{name}">
<h3>{title}{unit}</h3>
<div class="holder"></div>
<div class="readout"></div>
<div class="caption">{caption}</div>
</div>
"""


def render(title: str, intro: str, sections: Sequence[tuple[str, str]],
           data: dict[str, Any]) -> str:
  """The page.

  Args:
    title: plain text. intro: HTML below it.
    sections: (heading, HTML) in order.
    data: what the scripts read: `panels`, `labels`, `inspectors`.
  """
  links = ''.join(f'<a href="#s{i}">{text(heading)}</a>'
                  for i, (heading, _) in enumerate(sections))
  body = ''.join(f'<h2 id="s{i}">{text(heading)}</h2>{content}'
                 for i, (heading, content) in enumerate(sections))
  parts = {name: (_WEB / name).read_text('utf-8') for name in (
      'page.css', 'charts.js', 'inspector.js')}
  return _PAGE.format(
      title=text(title), style=parts['page.css'],
      body=f'<h1>{text(title)}</h1>{intro}<nav>{links}</nav>{body}',
      data=_embedded(data), charts=parts['charts.js'],
      inspector=parts['inspector.js'])


def _embedded(data):
  """JSON that cannot end the script element it stands in."""
  return json.dumps(data, allow_nan=False, ensure_ascii=False).replace(
      '<', '\\u003c').replace('\u2028', '\\u2028').replace('\u2029', '\\u2029')


def text(value: Any) -> str:
  """Escaped for HTML."""
  return html.escape(str(value))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]],
          numbers: Iterable[int] = ()) -> str:
  """Rows of text; the columns in `numbers` are set to the right."""
  right = set(numbers)

  def cells(row, tag):
    return ''.join(
        f'<{tag}{" class=number" if i in right else ""}>{text(value)}</{tag}>'
        for i, value in enumerate(row))

  body = ''.join(f'<tr>{cells(row, "td")}</tr>' for row in rows)
  return (f'<div class="scroll"><table><thead><tr>{cells(head, "th")}</tr>'
          f'</thead><tbody>{body}</tbody></table></div>')


def figures(panels: Sequence[dict[str, Any]]) -> str:
  """Places that charts.js draws into."""
  return _FIGURES.format(cards=''.join(
      _CARD.format(name=text(p['name']), title=text(p['title']),
                   unit=text(f', {p["unit"]}' if p['unit'] else ''),
                   caption=text(p['caption'])) for p in panels))


def inspector() -> str:
  """Places that inspector.js fills."""
  return _INSPECTOR


def heat_map(names: Sequence[str], matrix: Sequence[Sequence[float]]) -> str:
  """A table of cosines, −1 … 1, coloured."""
  head = ''.join(f'<th>{text(name)}</th>' for name in names)
  rows = ''.join(
      f'<tr><th>{text(name)}</th>' + ''.join(map(_heat_cell, row)) + '</tr>'
      for name, row in zip(names, matrix))
  return ('<div class="scroll"><table class="heat"><thead><tr><td></td>'
          f'{head}</tr></thead><tbody>{rows}</tbody></table></div>')


def _heat_cell(value):
  hue = 'up' if value > 0 else 'down'
  return (f'<td style="background: rgba(var(--{hue}), '
          f'{0.75 * abs(value):.3f})">{value:.2f}</td>')
