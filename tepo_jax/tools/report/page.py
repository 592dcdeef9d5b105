"""Renders one self-contained HTML page, which needs no network.

Text from models, data sets and configs is escaped here, and set as textContent
by the scripts.
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

# The elements that inspector.js fills.
INSPECTOR = """
<p>Tokens are coloured by the selected quantity. Point at a token, tap it, or
use the keys, to see its exact values. <span class="muted"
id="inspector-about"></span></p>
<div class="card" id="inspector" tabindex="0">
<div class="controls">
<select id="which" aria-label="run"></select>
<select id="quantity" aria-label="quantity"></select>
<select id="filter" aria-label="filter">
<option value="all">all groups</option>
<option value="mixed">mixed groups</option>
<option value="trained">trained on</option>
<option value="right">all correct</option>
<option value="wrong">all wrong</option></select>
<select id="sort" aria-label="order">
<option value="order">in data order</option>
<option value="gap">largest sampler gap first</option>
<option value="entropy">largest entropy change first</option>
<option value="masked">most tokens in M first</option>
<option value="reward">highest reward first</option></select>
<button type="button" id="previous">‹ previous</button>
<button type="button" id="next">next ›</button>
<span id="count" class="muted"></span>
</div>
<p class="caption"><span id="ramp"></span></p>
<div id="group"></div>
<p class="caption">Keys: <kbd>←</kbd> <kbd>→</kbd> token, <kbd>↑</kbd>
<kbd>↓</kbd> completion, <kbd>n</kbd> <kbd>p</kbd> group, <kbd>q</kbd>
quantity, <kbd>Esc</kbd> hides the values.</p>
</div>
<h3 style="margin-top: 1rem">Tokens most often in M</h3>
<p class="caption">After the step's updates, in the completions that were
trained on; count: all occurrences there.</p>
<p class="muted" id="masked-none">None, or not computed: --inspect computes
them.</p>
<div class="scroll"><table id="masked-table"><thead><tr><th>token</th>
<th class="number">id</th><th class="number">in M</th>
<th class="number">count</th><th class="number">share</th></tr></thead>
<tbody id="masked"></tbody></table></div>
<div class="tip" id="tip" role="status" hidden></div>
"""

_FIGURES = """
<div class="controls" id="legend"></div>
<p class="caption">Point at a figure, or focus it and use <kbd>←</kbd>
<kbd>→</kbd>, to see its numbers. The folder of this page has the same figures
as PNG and SVG.</p>
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
  """Renders the page.

  Args:
    title: plain text. intro: HTML below it.
    sections: (heading, HTML) in order.
    data: for the scripts: `panels`, `labels`, `inspectors`.
  """
  links = ''.join(f'<a href="#s{i}">{text(heading)}</a>'
                  for i, (heading, _) in enumerate(sections))
  body = ''.join(f'<h2 id="s{i}">{text(heading)}</h2>{content}'
                 for i, (heading, content) in enumerate(sections))
  style, charts, inspector = ((_WEB / name).read_text('utf-8') for name in (
      'page.css', 'charts.js', 'inspector.js'))
  # JSON that cannot end its script element.
  embedded = json.dumps(data, allow_nan=False, ensure_ascii=False).replace(
      '<', '\\u003c').replace('\u2028', '\\u2028').replace('\u2029', '\\u2029')
  return _PAGE.format(
      title=text(title), style=style, charts=charts, inspector=inspector,
      body=f'<h1>{text(title)}</h1>{intro}<nav>{links}</nav>{body}',
      data=embedded)


def text(value: Any) -> str:
  """Escapes for HTML."""
  return html.escape(str(value))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]],
          numbers: Iterable[int] = ()) -> str:
  """Returns a table of text; the columns in `numbers` are right-aligned."""
  right = set(numbers)

  def cells(row, tag):
    return ''.join(
        f'<{tag}{" class=number" if i in right else ""}>{text(value)}</{tag}>'
        for i, value in enumerate(row))

  body = ''.join(f'<tr>{cells(row, "td")}</tr>' for row in rows)
  return (f'<div class="scroll"><table><thead><tr>{cells(head, "th")}</tr>'
          f'</thead><tbody>{body}</tbody></table></div>')


def figures(panels: Sequence[dict[str, Any]]) -> str:
  """Returns the elements that charts.js fills."""
  return _FIGURES.format(cards=''.join(
      _CARD.format(name=text(p['name']), title=text(p['title']),
                   unit=text(f', {p["unit"]}' if p['unit'] else ''),
                   caption=text(p['caption'])) for p in panels))


def heat_map(names: Sequence[str], matrix: Sequence[Sequence[float]]) -> str:
  """Returns a coloured table of cosines, −1 … 1."""
  head = ''.join(f'<th>{text(name)}</th>' for name in names)
  rows = ''.join(f'<tr><th>{text(name)}</th>' + ''.join(
      f'<td style="background: rgba(var(--{"up" if value > 0 else "down"}), '
      f'{0.75 * abs(value):.3f})">{value:.2f}</td>' for value in row) + '</tr>'
                 for name, row in zip(names, matrix))
  return ('<div class="scroll"><table class="heat"><thead><tr><td></td>'
          f'{head}</tr></thead><tbody>{rows}</tbody></table></div>')
