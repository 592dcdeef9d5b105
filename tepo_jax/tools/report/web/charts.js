'use strict';
// The figures: SVG drawn from the embedded data; no library, no network.

const report = JSON.parse(document.getElementById('data').textContent);
const hidden = new Set();
let withSeeds = false;

function element(name, attributes = {}, ...children) {
  const svg = ['svg', 'path', 'line', 'text', 'g', 'circle', 'rect',
               'clipPath', 'defs', 'title'].includes(name);
  const node = svg
    ? document.createElementNS('http://www.w3.org/2000/svg', name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function digits(value) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function ticks(low, high, wanted) {
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(x => x * power).find(x => x >= raw);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) {
    found.push(Number((k * step).toPrecision(12)));
  }
  return found;
}

const WIDTH = 360, HEIGHT = 210, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 30;

// The range of the means; bands may widen it by its size on each side.
function domain(curves) {
  const means = curves.flatMap(c => c.mean);
  const low = Math.min(...means), high = Math.max(...means);
  const span = (high - low) || Math.abs(high) || 1;
  const bottom = Math.max(low - span, Math.min(low, ...curves.flatMap(
    c => c.low)));
  const top = Math.min(high + span, Math.max(high, ...curves.flatMap(
    c => c.high)));
  const pad = ((top - bottom) || span) * 0.05;
  return [bottom - pad, top + pad];
}

function path(steps, values, x, y) {
  return steps.map((s, i) => `${i ? 'L' : 'M'}${x(s).toFixed(1)},` +
                   `${y(values[i]).toFixed(1)}`).join('');
}

function colour(index) {
  return {stroke: `var(--c${index % 8})`,
          'stroke-dasharray': ['none', '6 4', '2 3', '8 3 2 3'][
            Math.floor(index / 8) % 4]};
}

function drawChart(card, panel) {
  const curves = panel.curves.map((curve, index) => ({...curve, index}))
    .filter(curve => curve.step.length && !hidden.has(curve.label));
  const holder = card.querySelector('.holder');
  holder.replaceChildren();
  if (!curves.length) {
    holder.append(element('p', {class: 'muted'}, 'Nothing recorded.'));
    return;
  }
  const steps = curves.flatMap(c => c.step);
  const first = Math.min(...steps), last = Math.max(...steps);
  const [bottom, top] = domain(curves);
  const x = s => LEFT + (WIDTH - LEFT - RIGHT) * (
    last > first ? (s - first) / (last - first) : 0.5);
  const y = v => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (v - bottom) /
                                                 (top - bottom));
  const clip = `clip-${panel.name}`;
  const svg = element('svg', {
    class: 'chart', viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img',
    tabindex: 0, 'aria-label': panel.title});
  svg.append(element('defs', {}, element('clipPath', {id: clip}, element(
    'rect', {x: LEFT, y: TOP, width: WIDTH - LEFT - RIGHT,
             height: HEIGHT - TOP - BOTTOM}))));
  for (const tick of ticks(bottom, top, 5)) {
    svg.append(
      element('line', {class: 'axis', x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick),
                       y2: y(tick)}),
      element('text', {x: LEFT - 5, y: y(tick) + 4, 'text-anchor': 'end'},
              digits(tick)));
  }
  for (const tick of ticks(first, last > first ? last : first + 1, 6)) {
    if (tick > last || tick !== Math.round(tick)) continue;
    svg.append(element('text', {x: x(tick), y: HEIGHT - 14,
                                'text-anchor': 'middle'}, String(tick)));
  }
  svg.append(element('text', {x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 2,
                              'text-anchor': 'middle'}, 'rollout step'));
  const marks = element('g', {'clip-path': `url(#${clip})`});
  for (const c of curves) {
    const back = c.step.slice().reverse();
    marks.append(element('path', {
      class: 'band', style: `fill: var(--c${c.index % 8})`,
      d: path(c.step, c.high, x, y) +
         path(back, c.low.slice().reverse(), x, y).replace('M', 'L') + 'Z'}));
    for (const seed of withSeeds ? Object.values(c.seeds) : []) {
      const at = Object.keys(seed).map(Number);
      marks.append(element('path', {
        class: 'seed', ...colour(c.index),
        d: path(at, at.map(s => seed[s]), x, y)}));
    }
    marks.append(element('path', {class: 'mean', ...colour(c.index),
                                  d: path(c.step, c.mean, x, y)}));
    if (c.step.length < 30) {
      for (const [i, s] of c.step.entries()) {
        marks.append(element('circle', {
          cx: x(s), cy: y(c.mean[i]), r: 2, style:
          `fill: var(--c${c.index % 8})`}));
      }
    }
  }
  svg.append(marks);
  addReadout(card, svg, curves, x, first, last);
  holder.append(svg);
}

function addReadout(card, svg, curves, x, first, last) {
  const cursor = element('line', {class: 'cursor', y1: TOP,
                                  y2: HEIGHT - BOTTOM, x1: -9, x2: -9});
  const readout = card.querySelector('.readout');
  const steps = [...new Set(curves.flatMap(c => c.step))].sort((a, b) => a - b);
  let place = steps.length - 1;
  svg.append(cursor);
  const show = () => {
    const step = steps[place];
    cursor.setAttribute('x1', x(step));
    cursor.setAttribute('x2', x(step));
    readout.replaceChildren(element('span', {}, `step ${step}`));
    for (const c of curves) {
      const i = c.step.indexOf(step);
      if (i < 0) continue;
      const band = c.count[i] > 1
        ? ` [${digits(c.low[i])}, ${digits(c.high[i])}] n=${c.count[i]}` : '';
      readout.append(element(
        'span', {style: `color: var(--c${c.index % 8})`},
        `${c.label} ${digits(c.mean[i])}${band}`));
    }
  };
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * WIDTH;
    const distance = step => Math.abs(x(step) - at);
    place = steps.reduce((best, step, i) =>
      distance(step) < distance(steps[best]) ? i : best, 0);
    show();
  });
  svg.addEventListener('keydown', event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    event.preventDefault();
    place = Math.max(0, Math.min(steps.length - 1, place + move));
    show();
  });
}

function drawAll() {
  for (const panel of report.panels) {
    drawChart(document.getElementById(`panel-${panel.name}`), panel);
  }
}

function legend() {
  const place = document.getElementById('legend');
  report.labels.forEach((label, index) => {
    const dash = ['solid', 'dashed', 'dotted', 'dashed'][
      Math.floor(index / 8) % 4];
    const button = element(
      'button', {'aria-pressed': 'true', type: 'button'},
      element('span', {class: 'key', style:
        `color: var(--c${index % 8}); border-top-style: ${dash}`}), label);
    button.addEventListener('click', () => {
      hidden.has(label) ? hidden.delete(label) : hidden.add(label);
      button.setAttribute('aria-pressed', String(!hidden.has(label)));
      drawAll();
    });
    place.append(button);
  });
  const seeds = element('button', {'aria-pressed': 'false', type: 'button'},
                        'each seed');
  seeds.addEventListener('click', () => {
    withSeeds = !withSeeds;
    seeds.setAttribute('aria-pressed', String(withSeeds));
    drawAll();
  });
  place.append(seeds);
}

legend();
drawAll();
