'use strict';
// The token inspector: shows one group, with tokens coloured by a quantity.

function current() { return report.inspectors[view.which]; }

function chosen() {
  return current().quantities.find(q => q.key === view.quantity);
}

function sizes(group, key) {
  return group.completions.flatMap(c => c.values[key] || [])
    .filter(v => v !== null).map(Math.abs);
}

const FILTERS = {
  all: () => true, mixed: g => g.mixed, trained: g => g.trained,
  right: g => g.completions.every(c => c.correct),
  wrong: g => g.completions.every(c => !c.correct)};
const mean = x => x.length ? x.reduce((a, b) => a + b, 0) / x.length : 0;
const SORTS = {
  order: () => 0,
  gap: g => -Math.max(0, ...sizes(g, 'sampler_gap')),
  entropy: g => -mean(sizes(g, 'entropy_change')),
  masked: g => -mean(sizes(g, 'region')),
  reward: g => -mean(g.completions.map(c => c.reward))};

function groups() {
  const key = SORTS[view.sort];
  return current().groups.filter(FILTERS[view.filter])
    .map(g => [key(g), g]).sort((a, b) => a[0] - b[0]).map(pair => pair[1]);
}

// The colour scale's end: 98th percentile of the distance from the centre.
function reach(quantity) {
  const all = current().groups.flatMap(g => g.completions.flatMap(
    c => c.values[quantity.key])).filter(v => v !== null)
    .map(v => Math.abs(v - quantity.centre)).filter(v => v > 0)
    .sort((a, b) => a - b);
  return all.length ? all[Math.floor(0.98 * (all.length - 1))] : 1;
}

function shade(quantity, value, scale) {
  if (value === null) return '';
  const distance = value - quantity.centre;
  if (quantity.scale === 'flag') {
    return value === 0 ? '' :
      `rgba(var(${value > 0 ? '--flag' : '--down'}), .6)`;
  }
  const strength = Math.min(1, Math.abs(distance) / scale) * 0.75;
  const hue = quantity.scale === 'sequential' || distance > 0
    ? '--up' : '--down';
  return strength > 0.004 ? `rgba(var(${hue}), ${strength.toFixed(3)})` : '';
}

// The colours of quantities that are 0 or ±1.
const FLAGS = {
  region: [['--flag', 'in M: the penalty acts on this token']],
  clipped: [['--flag', 'clipped above'], ['--down', 'clipped below']]};

// Why the page shows no group. A step may train on none of its mixed groups, if
// they are too few.
const EMPTY = {
  mixed: () => `has ${current().mixed}`,
  trained: () => 'was trained on' + (current().groups.some(FILTERS.mixed)
    ? '' : `: none has ${current().mixed}`),
  right: () => 'has only correct completions',
  wrong: () => 'has only wrong completions'};

function drawRamp(quantity, scale) {
  const ramp = byId('ramp');
  ramp.replaceChildren();
  if (quantity.scale === 'flag') {
    for (const [hue, text] of FLAGS[quantity.key]) {
      ramp.append(element('span', {class: 'ramp flag', style:
        `background: rgba(var(${hue}), .6)`}), ` ${text}  `);
    }
    return;
  }
  const low = quantity.scale === 'diverging' ? quantity.centre - scale : 0;
  const from = quantity.scale === 'diverging' ? 'rgba(var(--down), .75), ' : '';
  ramp.append(digits(low, 3), ' ', element('span', {
    class: 'ramp', style: `background: linear-gradient(to right, ${from}` +
      'transparent, rgba(var(--up), .75))'}), ' ',
    digits(quantity.scale === 'diverging' ? quantity.centre + scale : scale,
           3),
    ' (98 % of the tokens lie in this range)');
}

function tokenText(id) {
  return current().vocabulary[id].replaceAll('\n', '⏎\n') || '∅';
}

function drawCompletion(completion, index, quantity, scale) {
  const card = element('div', {class: 'card'});
  const facts = element('div', {class: 'facts'});
  facts.append(
    element('span', {class: completion.correct ? 'good' : 'bad'},
            completion.correct ? '✓ correct' : '✗ wrong'),
    element('span', {title: String(completion.reward)},
            `reward ${digits(completion.reward, 3)}`),
    ...Object.entries(completion.scores).map(([name, value]) => element(
      'span', {title: String(value)},
      `${name} ${value === null ? 'failed' : digits(value, 3)}`)),
    element('span', {}, 'answer: ', completion.extracted === null
      ? element('em', {}, 'none') : element('b', {}, completion.extracted)),
    element('span', {}, `${completion.tokens.length} tokens` +
            (completion.truncated ? ', truncated' : '')));
  const text = element('div', {class: 'completion'});
  const values = completion.values[quantity.key];
  completion.tokens.forEach((id, t) => {
    const span = element('span', {class: 'token', tabindex: -1,
                                  'data-c': index, 'data-t': t});
    span.textContent = tokenText(id);
    span.style.background = shade(quantity, values[t], scale);
    text.append(span);
  });
  card.append(facts, text);
  return card;
}

function draw() {
  const shown = groups();
  view.place = Math.max(0, Math.min(view.place, shown.length - 1));
  const quantity = chosen(), scale = reach(quantity);
  byId('tip').hidden = true;
  // The focused token is about to be removed; keys still need a focus.
  const box = byId('inspector');
  if (byId('group').contains(document.activeElement)) {
    box.focus({preventScroll: true});
  }
  drawRamp(quantity, scale);
  byId('count').textContent = shown.length
    ? `group ${view.place + 1} of ${shown.length}` : 'no group matches';
  const place = byId('group');
  place.replaceChildren();
  byId('inspector-about').textContent = current().about;
  drawSummary();
  if (!shown.length) {
    place.append(element('p', {class: 'muted'}, 'No group of this step ' +
      `${EMPTY[view.filter]()}. Choose "all groups" to see the others.`));
    return;
  }
  const group = shown[view.place];
  const problem = element('div', {class: 'problem'});
  problem.textContent = group.problem;
  const kind = (group.mixed ? 'mixed' : 'not mixed') +
    (group.trained ? ', trained on' : ', not trained on');
  const facts = element('p', {class: 'caption'});
  facts.textContent = `${group.id} · ${kind} · reference answer: ` +
    group.answers.join(' or ');
  place.append(problem, facts);
  const list = element('div', {class: 'completions'});
  group.completions.forEach((completion, index) => list.append(
    drawCompletion(completion, index, quantity, scale)));
  place.append(list);
}

function drawSummary() {
  const body = byId('masked');
  body.replaceChildren();
  byId('masked-none').hidden = current().summary.length > 0;
  byId('masked-table').hidden = !current().summary.length;
  for (const row of current().summary) {
    const token = element('td');
    token.append(element('code', {}, JSON.stringify(row.token)));
    body.append(element('tr', {}, token, ...[
      row.id, row.inside, row.count, `${(100 * row.share).toFixed(1)} %`]
      .map(value => element('td', {class: 'number'}, String(value)))));
  }
}

function showToken(span) {
  document.querySelectorAll('.token.shown').forEach(
    other => other.classList.remove('shown'));
  span.classList.add('shown');
  const completion = groups()[view.place].completions[span.dataset.c];
  const t = Number(span.dataset.t), id = completion.tokens[t];
  const body = element('tbody');
  for (const quantity of current().quantities) {
    const value = completion.values[quantity.key][t];
    body.append(element(
      'tr', {class: quantity.key === view.quantity ? 'chosen' : ''},
      element('td', {}, quantity.label),
      element('td', {class: 'number'}, value === null ? 'NaN'
        : digits(value, 3)),
      element('td', {class: 'number muted', 'data-key': quantity.key},
              value === null ? 'NaN' : String(value))));
  }
  const tip = byId('tip');
  tip.replaceChildren(
    element('div', {}, element('code', {}, JSON.stringify(
      current().vocabulary[id])), ` · id ${id} · token ${t + 1}`),
    element('table', {}, body));
  tip.hidden = false;
  placeTip(tip, span.getBoundingClientRect());
}

function placeTip(tip, box) {
  const page = document.documentElement;
  const left = Math.min(box.left, page.clientWidth - tip.offsetWidth - 8);
  const below = box.bottom + 8 + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, below ? box.bottom + 8
    : box.top - tip.offsetHeight - 8)}px`;
}

function moveToken(dc, dt) {
  const now = document.querySelector('.token.shown');
  const c = now ? Number(now.dataset.c) + dc : 0;
  const t = now ? Number(now.dataset.t) + dt : 0;
  const row = document.querySelectorAll(`.token[data-c="${c}"]`);
  if (!row.length) return;
  const span = row[Math.max(0, Math.min(t, row.length - 1))];
  span.focus({preventScroll: true});
  span.scrollIntoView({block: 'nearest'});
  showToken(span);
}

function moveGroup(by) {
  choose({place: Math.max(0, Math.min(view.place + by, groups().length - 1))});
  draw();
}

function nextQuantity() {
  const keys = current().quantities.map(q => q.key);
  choose({quantity: keys[(keys.indexOf(view.quantity) + 1) % keys.length]});
  byId('quantity').value = view.quantity;
  draw();
}

const KEYS = {
  ArrowLeft: () => moveToken(0, -1), ArrowRight: () => moveToken(0, 1),
  ArrowUp: () => moveToken(-1, 0), ArrowDown: () => moveToken(1, 0),
  n: () => moveGroup(1), p: () => moveGroup(-1), q: nextQuantity,
  Escape: () => { byId('tip').hidden = true; }};

function fillQuantities() {
  const select = byId('quantity'), had = view.quantity;
  select.replaceChildren(...current().quantities.map(
    q => element('option', {value: q.key}, q.label)));
  const keys = current().quantities.map(q => q.key);
  const preferred = keys.includes('entropy_change') ? 'entropy_change'
    : keys[0];
  view.quantity = select.value = keys.includes(had) ? had : preferred;
}

function startInspector() {
  if (!report.inspectors.length) return;
  byId('which').append(...report.inspectors.map(
    (item, i) => element('option', {value: i}, item.title)));
  fillQuantities();
  byId('which').value = String(view.which);
  byId('filter').value = view.filter in FILTERS ? view.filter : 'all';
  byId('sort').value = view.sort in SORTS ? view.sort : 'order';
  Object.assign(view, {filter: byId('filter').value, sort: byId('sort').value});
  byId('which').addEventListener('change', event => {
    choose({which: Number(event.target.value), place: 0});
    fillQuantities();
    draw();
  });
  for (const name of ['quantity', 'filter', 'sort']) {
    byId(name).addEventListener('change', event => {
      choose({[name]: event.target.value});
      if (name !== 'quantity') choose({place: 0});
      draw();
    });
  }
  byId('previous').addEventListener('click', () => moveGroup(-1));
  byId('next').addEventListener('click', () => moveGroup(1));
  const box = byId('inspector');
  for (const kind of ['pointerover', 'focusin', 'click']) {
    box.addEventListener(kind, event => {
      const span = event.target.closest('.token');
      if (span) showToken(span);
    });
  }
  box.addEventListener('pointerleave', () => { byId('tip').hidden = true; });
  box.addEventListener('keydown', event => {
    const typed = event.target.closest('select');
    if (typed || !(event.key in KEYS) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  draw();
}

startInspector();
