// Where Markdown has formulas: $…$, $$…$$, \(…\) and \[…\], as extensions of its library.
// Each look is bounded, and one that finds nothing is not repeated for what follows, so a text takes time like its length.

const MAX_CHARS = 4000; // of a formula
const CLOSES = { $$: "$$", "\\[": "\\]", "\\(": "\\)" };
const EMPTY_LINE = /\n\s*\n/; // a formula has none
const DOLLAR = /^\$(?!\s)((?:\\.|[^$\\\n]){1,4000})(?<!\s)\$(?!\d)/; // which is no price
const BLOCK = /^( {0,3})(?:\$\$|\\\[)/;
const BLOCK_OR_END = /\n(?:[ \t]*\n|(?= {0,3}(?:\$\$|\\\[)))/g; // the next that may be one, in this paragraph

/** The formula with which a text begins, with two characters in front: its text, and its end. An open one ends with the text. */
function formula(text) {
  const close = CLOSES[text.slice(0, 2)];
  if (!close) return undefined;
  const rest = text.slice(2, 2 + MAX_CHARS + close.length);
  const end = rest.indexOf(close);
  const found = end < 0 ? rest : rest.slice(0, end);
  if (!found || found.length > MAX_CHARS || EMPTY_LINE.test(found)) return undefined;
  return { text: found, isOpen: end < 0, end: 2 + found.length + (end < 0 ? 0 : close.length) };
}

const token = (raw, text, display) => ({ type: "math", raw, text, display });

const inline = {
  name: "inlineMath",
  level: "inline",
  start: (text) => text.indexOf("$"), // the library itself stops at a backslash
  tokenizer(text) {
    const found = formula(text);
    if (found && !found.isOpen) return token(text.slice(0, found.end), found.text, text[1] !== "(");
    const dollar = DOLLAR.exec(text);
    return dollar ? token(dollar[0], dollar[1], false) : undefined;
  },
};

/** A formula in lines of its own. One that has no end yet has no text. */
const block = {
  name: "blockMath",
  level: "block",
  start(text) {
    BLOCK_OR_END.lastIndex = 0;
    for (let found; (found = BLOCK_OR_END.exec(text)) && found[0] === "\n"; )
      if (block.tokenizer(text.slice(BLOCK_OR_END.lastIndex, BLOCK_OR_END.lastIndex + MAX_CHARS + 99))) return BLOCK_OR_END.lastIndex;
    return undefined;
  },
  tokenizer(text) {
    const indent = BLOCK.exec(text)?.[1].length;
    const found = indent === undefined ? undefined : formula(text.slice(indent));
    const line = found && /^[ \t]*(?:\n|$)/.exec(text.slice(indent + found.end));
    return line ? token(text.slice(0, indent + found.end + line[0].length), found.isOpen ? "" : found.text, true) : undefined;
  },
};

/** Their tokens have the type `math`, `text`, and `display`. */
export const mathExtensions = [inline, block];
