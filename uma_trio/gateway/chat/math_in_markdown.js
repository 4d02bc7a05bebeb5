// Where Markdown has formulas: $…$, $$…$$, \(…\) and \[…\], as extensions of its library.

const raw = String.raw;
const until = (end) => raw`((?:(?!\n\s*\n|${end})[^]){1,4000})`; // a formula has no empty line
const DOLLARS = raw`\$\$${until(raw`\$\$`)}`;
const BRACKETS = raw`\\\[${until(raw`\\\]`)}`;
const PARENTHESES = raw`\\\(${until(raw`\\\)`)}\\\)`;
const DOLLAR = raw`\$(?!\s)((?:\\.|[^$\\\n]){1,4000})(?<!\s)\$(?!\d)`; // which is no price
const INLINE = new RegExp(raw`^(?:${DOLLARS}\$\$|${BRACKETS}\\\]|${PARENTHESES}|${DOLLAR})`);
const BLOCK = new RegExp(raw`^ {0,3}(?:${DOLLARS}(\$\$|$)|${BRACKETS}(\\\]|$))[ \t]*(?:\n|$)`);

const inline = {
  name: "inlineMath",
  level: "inline",
  start: (text) => text.match(/\$|\\[([]/)?.index,
  tokenizer(text) {
    const [found, dollars, brackets, ...others] = text.match(INLINE) ?? [];
    const display = dollars ?? brackets;
    if (found) return { type: "math", raw: found, text: display ?? others.find(Boolean), display: display !== undefined };
  },
};

/** A formula in lines of its own. One that has no end yet has no text. */
const block = {
  name: "blockMath",
  level: "block",
  start: (text) => text.match(/(?<=^|\n) {0,3}(?:\$\$|\\\[)/)?.index,
  tokenizer(text) {
    const [found, dollars, end, brackets, otherEnd] = text.match(BLOCK) ?? [];
    if (found) return { type: "math", raw: found, text: end || otherEnd ? (dollars ?? brackets) : "", display: true };
  },
};

/** Their tokens have the type `math`, `text`, and `display`. */
export const mathExtensions = [inline, block];
