// Small helpers for the page. Text that comes from outside only ever becomes a text node.

export const byId = (id) => document.getElementById(id);

/** Make an element: el("p", {class: "muted"}, "text", child). */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Change a text only where it differs, so that the page does no needless layout. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** The old way to copy, for a page that came without HTTPS from another machine. */
function copyFromField(text, beside) {
  const field = el("textarea");
  field.value = text;
  beside.after(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  beside.focus();
  if (!isCopied) throw new Error("the browser does not copy");
}

/** Copy a text, and say so on the button that was pressed. */
export async function copy(text, button) {
  button.dataset.label ??= button.textContent;
  try {
    await (navigator.clipboard ? navigator.clipboard.writeText(text) : copyFromField(text, button));
    setText(button, "Copied");
  } catch {
    setText(button, "Not copied: select the text");
  }
  setTimeout(() => setText(button, button.dataset.label), 1500);
}

/** Show rows of cells. A cell is a text, or [text, class, title]. Rows that stay keep their elements. */
export function setRows(body, rows, whenEmpty) {
  const shown = rows.length || !whenEmpty ? rows : [[[whenEmpty, "muted"]]];
  while (body.rows.length > shown.length) body.deleteRow(-1);
  shown.forEach((cells, i) => {
    const row = body.rows[i] ?? body.insertRow();
    while (row.cells.length > cells.length) row.deleteCell(-1);
    cells.forEach((cell, j) => {
      const [text, kind, title = text] = Array.isArray(cell) ? cell : [cell, ""];
      const shownCell = row.cells[j] ?? row.insertCell();
      setText(shownCell, text);
      if (shownCell.title !== title) shownCell.title = title;
      if (shownCell.className !== kind) shownCell.className = kind;
    });
  });
}

const whole = new Intl.NumberFormat("en");

export const count = (n) => whole.format(Math.round(n));

export const counted = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;

export const ms = (value) =>
  value == null ? "–" : value >= 10_000 ? `${(value / 1000).toFixed(1)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`;

export function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} days`;
}

export const shortened = (name) => (name.length > 15 ? `${name.slice(0, 7)}…${name.slice(-6)}` : name);

/** Size a canvas to the pixels of its place. Returns its context, its size in CSS pixels, and whether it has changed. */
export function fitted(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
  const changed = canvas.width !== width || canvas.height !== height;
  if (changed) [canvas.width, canvas.height] = [width, height];
  return { context: canvas.getContext("2d"), width, height, ratio, changed };
}

/** The colours of the style sheet, as they are in the present colour scheme. */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["panel", "ink", "muted", "line", "decode", "prefill", "reserved", "cached", "field"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
