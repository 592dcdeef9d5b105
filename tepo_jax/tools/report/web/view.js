'use strict';
// What the reader has chosen, kept in the page's address: #window=20&from=3 …
// A reload, a bookmark or a copied address shows the same view.

const report = JSON.parse(document.getElementById('data').textContent);
const byId = id => document.getElementById(id);

const view = {
  window: report.window, hide: [], seeds: false, from: null, to: null,
  section: '', which: 0, quantity: '', filter: 'all', sort: 'order', place: 0};
const defaults = {...view};

// Reads one value as the type of its default; steps are numbers.
function parsed(name, text) {
  if (name === 'hide') return text.split(',').filter(Boolean).map(Number);
  if (name === 'seeds') return text === 'true';
  if (['window', 'from', 'to', 'which', 'place'].includes(name)) {
    return Number.isFinite(Number(text)) ? Number(text) : defaults[name];
  }
  return text;
}

function readAddress() {
  Object.assign(view, defaults, {hide: []});
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    if (name in defaults) view[name] = parsed(name, text);
  }
  if (!report.windows.includes(view.window)) view.window = defaults.window;
  if (!report.inspectors[view.which]) view.which = 0;
}

function writeAddress() {
  const chosen = new URLSearchParams();
  for (const [name, value] of Object.entries(view)) {
    if (String(value) !== String(defaults[name]) && value !== null) {
      chosen.set(name, String(value));
    }
  }
  history.replaceState(null, '', `#${chosen}`);
}

// Changes the view and its address; the caller draws.
function choose(changes) {
  Object.assign(view, changes);
  writeAddress();
}

readAddress();
for (const link of document.querySelectorAll('nav a')) {
  link.addEventListener('click', event => {
    event.preventDefault();
    choose({section: link.getAttribute('href').slice(1)});
    byId(view.section).scrollIntoView();
  });
}
