'use strict';
// The figures: SVG drawn from the embedded data; no library, no network.

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

function digits(value, wanted = 4) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(wanted)));
}

// Round numbers from low to high: about `wanted`, at least one less.
function ticks(low, high, wanted) {
  const power = 10 ** Math.floor(Math.log10((high - low) / wanted));
  for (const step of [10, 5, 2, 1, 0.5].map(x => x * power)) {
    const found = [];
    for (let k = Math.ceil(low / step); k * step <= high; k++) {
      found.push(Number((k * step).toPrecision(12)));
    }
    if (found.length >= wanted - 1) return found;
  }
  return [];
}

// Their texts, with as many decimals as the one that needs most.
function tickTexts(values) {
  const most = Math.max(...values.map(Math.abs));
  const isPlain = most >= 1e-3 && most < 1e6;
  const decimals = Math.max(...values.map(v => (
    (isPlain ? v.toFixed(12) : v.toExponential(12)).match(
      /\.(\d*?)0*(e|$)/)[1].length)));
  return values.map(v => v === 0 ? '0' : isPlain ? v.toFixed(decimals)
    : v.toExponential(decimals));
}

// Whole steps: the first, the last, and round ones that leave them space.
function stepTicks(first, last) {
  if (first === last) return [first];
  const apart = (last - first) / 12;
  return [first, ...ticks(first, last, 5).filter(
    t => t === Math.round(t) && t - first > apart && last - t > apart), last];
}

const WIDTH = 360, HEIGHT = 210, LEFT = 46, RIGHT = 12, TOP = 8, BOTTOM = 30;

// The range of the values; bands may widen it by its size on each side. What is
// never negative gets no negative axis.
function domain(curves) {
  const values = curves.flatMap(c => c.mean);
  const low = Math.min(...values), high = Math.max(...values);
  const span = (high - low) || Math.abs(high) || 1;
  const bottom = Math.max(low - span, Math.min(low, ...curves.flatMap(
    c => c.low)));
  const top = Math.min(high + span, Math.max(high, ...curves.flatMap(
    c => c.high)));
  const pad = ((top - bottom) || span) * 0.05;
  return [low >= 0 ? Math.max(0, bottom - pad) : bottom - pad, top + pad];
}

// At each step s, the mean of the values of steps s - window + 1 to s.
function trailingMean(steps, values, window) {
  return steps.map(s => {
    const recent = values.filter(
      (_, i) => steps[i] > s - window && steps[i] <= s);
    return recent.reduce((a, b) => a + b, 0) / recent.length;
  });
}

// The curve's steps within the zoom; means over steps before it count too.
function zoomed(curve, panel) {
  const window = panel.has_mean ? view.window : 1;
  const whole = {...curve, bold: window === 1 ? curve.mean
    : trailingMean(curve.step, curve.mean, window)};
  const inside = curve.step.map(s => (view.from === null || s >= view.from) &&
                                (view.to === null || s <= view.to));
  for (const name of ['step', 'mean', 'bold', 'low', 'high', 'count']) {
    whole[name] = whole[name].filter((_, i) => inside[i]);
  }
  return whole;
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
  const curves = panel.curves
    .map((curve, index) => ({...zoomed(curve, panel), index}))
    .filter(c => c.step.length && !view.hide.includes(c.index));
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
  const levels = ticks(bottom, top, 5), texts = tickTexts(levels);
  for (const [i, tick] of levels.entries()) {
    svg.append(
      element('line', {class: 'axis', x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick),
                       y2: y(tick)}),
      element('text', {x: LEFT - 5, y: y(tick) + 4, 'text-anchor': 'end'},
              texts[i]));
  }
  for (const tick of stepTicks(first, last)) {
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
    for (const seed of view.seeds ? Object.values(c.seeds) : []) {
      const at = Object.keys(seed).map(Number).filter(
        s => s >= first && s <= last);
      marks.append(element('path', {
        class: 'seed', ...colour(c.index),
        d: path(at, at.map(s => seed[s]), x, y)}));
    }
    if (c.bold !== c.mean && panel.has_mean && view.window > 1) {
      marks.append(element('path', {class: 'raw', ...colour(c.index),
                                    d: path(c.step, c.mean, x, y)}));
    }
    marks.append(element('path', {class: 'mean', ...colour(c.index),
                                  d: path(c.step, c.bold, x, y)}));
  }
  svg.append(marks);
  for (const c of curves.filter(some => some.step.length < 30)) {
    for (const [i, s] of c.step.entries()) {  // not cut off at the edges
      svg.append(element('circle', {
        cx: x(s), cy: y(c.bold[i]), r: 2,
        style: `fill: var(--c${c.index % 8})`}));
    }
  }
  addReadout(card, panel, svg, curves, x);
  addZoom(svg, first, last);
  holder.append(svg);
}

// Every figure shows the step that the pointer is at in one of them.
const cursors = new Map();

function showStep(step) {
  for (const show of cursors.values()) show(step);
}

function addReadout(card, panel, svg, curves, x) {
  const cursor = element('line', {class: 'cursor', y1: TOP,
                                  y2: HEIGHT - BOTTOM, x1: -9, x2: -9});
  const readout = card.querySelector('.readout');
  const steps = [...new Set(curves.flatMap(c => c.step))].sort((a, b) => a - b);
  const nearest = wanted => steps.reduce(
    (best, s) => Math.abs(s - wanted) < Math.abs(best - wanted) ? s : best);
  let step = steps[steps.length - 1];
  svg.append(cursor);
  const write = () => {
    readout.replaceChildren(element('span', {}, `step ${step}`));
    for (const c of curves) {
      const i = c.step.indexOf(step);
      if (i < 0) continue;
      const band = c.count[i] > 1
        ? ` [${digits(c.low[i])}, ${digits(c.high[i])}] n=${c.count[i]}` : '';
      const mean = panel.has_mean && view.window > 1
        ? element('span', {class: 'muted'},
                  ` (mean ${digits(c.bold[i])})`) : '';
      readout.append(element(
        'span', {class: 'value', style: `color: var(--c${c.index % 8})`},
        `${c.label} ${digits(c.mean[i])}${band}`, mean));
    }
  };
  write();  // the last step's: values that came later would move the figures
  cursors.set(panel.name, wanted => {
    step = nearest(wanted);
    cursor.setAttribute('x1', x(step));
    cursor.setAttribute('x2', x(step));
    write();
  });
  svg.addEventListener('pointermove', event => {
    const at = pointerX(svg, event);
    showStep(steps.reduce((best, s) =>
      Math.abs(x(s) - at) < Math.abs(x(best) - at) ? s : best));
  });
  svg.addEventListener('keydown', event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    event.preventDefault();
    const place = steps.indexOf(step) + move;
    showStep(steps[Math.max(0, Math.min(steps.length - 1, place))]);
  });
}

// The pointer's place in the units of the figure.
function pointerX(svg, event) {
  const box = svg.getBoundingClientRect();
  return (event.clientX - box.left) / box.width * WIDTH;
}

// Dragging selects steps for all figures.
function addZoom(svg, first, last) {
  const area = element('rect', {class: 'area', y: TOP, width: 0,
                                height: HEIGHT - TOP - BOTTOM});
  svg.append(area);
  const stepAt = at => first + (last - first) * Math.max(0, Math.min(
    1, (at - LEFT) / (WIDTH - LEFT - RIGHT)));
  let start = null;
  svg.addEventListener('pointerdown', event => {
    if (event.button === 0) start = pointerX(svg, event);
  });
  svg.addEventListener('pointermove', event => {
    if (start === null || !event.buttons) return;
    const end = pointerX(svg, event);
    area.setAttribute('x', Math.min(start, end));
    area.setAttribute('width', Math.abs(end - start));
  });
  svg.addEventListener('pointerup', event => {
    const end = pointerX(svg, event), begin = start;
    start = null;
    area.setAttribute('width', 0);
    if (begin === null || Math.abs(end - begin) < 8) return;
    const [from, to] = [begin, end].sort((a, b) => a - b).map(stepAt);
    if (Math.floor(to) > Math.ceil(from)) {
      choose({from: Math.ceil(from), to: Math.floor(to)});
      drawAll();
    }
  });
  svg.addEventListener('pointerleave', () => {
    start = null;
    area.setAttribute('width', 0);
  });
}

function drawAll() {
  cursors.clear();
  for (const panel of report.panels) {
    drawChart(byId(`panel-${panel.name}`), panel);
  }
  byId('whole').hidden = view.from === null && view.to === null;
}

function legend() {
  const place = byId('legend');
  place.replaceChildren();
  report.labels.forEach((label, index) => {
    const dash = ['solid', 'dashed', 'dotted', 'dashed'][
      Math.floor(index / 8) % 4];
    const button = element(
      'button', {'aria-pressed': String(!view.hide.includes(index)),
                 type: 'button'},
      element('span', {class: 'key', style:
        `color: var(--c${index % 8}); border-top-style: ${dash}`}), label);
    button.addEventListener('click', () => {
      const isHidden = view.hide.includes(index);
      choose({hide: isHidden ? view.hide.filter(i => i !== index)
        : [...view.hide, index]});
      button.setAttribute('aria-pressed', String(isHidden));
      drawAll();
    });
    place.append(button);
  });
  const seeds = element('button', {'aria-pressed': String(view.seeds),
                                   type: 'button'}, 'each seed');
  seeds.addEventListener('click', () => {
    choose({seeds: !view.seeds});
    seeds.setAttribute('aria-pressed', String(view.seeds));
    drawAll();
  });
  const window = element('select', {id: 'window', 'aria-label': 'mean of'},
    ...report.windows.map(n => element('option', {value: n}, n === 1
      ? 'as measured' : `mean of ${n} steps`)));
  window.value = String(view.window);
  window.addEventListener('change', () => {
    choose({window: Number(window.value)});
    drawAll();
  });
  const whole = element('button', {id: 'whole', type: 'button'}, 'all steps');
  whole.addEventListener('click', () => {
    choose({from: null, to: null});
    drawAll();
  });
  place.append(seeds, window, whole);
}

legend();
drawAll();
addEventListener('hashchange', () => {  // the reader edited the address
  readAddress();
  legend();
  drawAll();
});
if (byId(view.section)) byId(view.section).scrollIntoView();
