'use strict';
// Sorts a table by the column whose head is pressed: numbers by their value,
// durations by their length.

// '2h01m', '1m30s' or '45s', as progress.duration writes them.
const DURATION = /^(?=\d)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?$/;

function sortKey(row, column) {
  const text = row.cells[column].textContent.trim();
  const duration = text.match(DURATION);
  if (duration) {
    const [hours, minutes, seconds] = duration.slice(1).map(
      part => Number(part || 0));
    return 3600 * hours + 60 * minutes + seconds;
  }
  const number = parseFloat(text.replace('−', '-').replaceAll(',', ''));
  return Number.isNaN(number) ? text : number;
}

function compare(a, b) {
  if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
  return typeof a === 'number' ? -1 : 1;
}

for (const table of document.querySelectorAll('table')) {
  const head = table.tHead && table.tHead.rows[0];
  if (!head || table.className === 'heat' || table.closest('.tip')) continue;
  for (const [column, cell] of [...head.cells].entries()) {
    const button = element('button', {type: 'button', class: 'sort'});
    button.append(...cell.childNodes);
    cell.append(button);
    button.addEventListener('click', () => {
      const down = cell.getAttribute('aria-sort') === 'ascending';
      for (const other of head.cells) other.removeAttribute('aria-sort');
      cell.setAttribute('aria-sort', down ? 'descending' : 'ascending');
      const rows = [...table.tBodies[0].rows].map(
        row => [sortKey(row, column), row]);
      rows.sort((a, b) => compare(a[0], b[0]) * (down ? -1 : 1));
      table.tBodies[0].append(...rows.map(pair => pair[1]));
    });
  }
}
