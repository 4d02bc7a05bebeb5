// The lexer of the library of Markdown, in time like the length of a text, whatever the text is.
// The library goes from each mark over all that may close it, and over all that follows for each level of nesting.

import { Lexer } from "./vendor/marked.js";

const MAX_LEVELS = 32; // of quotes and lists in each other
const MAX_MARKS = 200; // of a part of a paragraph, heading or cell: each part is read alone
const MAX_BARS = 64; // of the heads of a table, as a row of one character has a cell for each
const MARKS = /[*_~[]/g;

/** The first part of a text: up to its last line break, or else space, before it has too many marks. */
function firstPart(text) {
  MARKS.lastIndex = 0;
  for (let n = 0; n <= MAX_MARKS; n++) if (!MARKS.exec(text)) return text;
  const part = text.slice(0, MARKS.lastIndex - 1);
  const end = ["\n", " "].map((each) => part.lastIndexOf(each)).find((at) => at > 0);
  return part.slice(0, end);
}

export class LexerWithBounds extends Lexer {
  levels = 0;

  blockTokens(text, tokens = [], ...rest) {
    if (this.levels >= MAX_LEVELS) {
      const plain = { type: "text", raw: text, text };
      tokens.push({ ...plain, tokens: [plain] });
      return tokens;
    }
    this.levels++;
    try {
      return super.blockTokens(text, tokens, ...rest);
    } finally {
      this.levels--;
    }
  }

  inlineTokens(text, tokens = []) {
    for (let part; text; text = text.slice(part.length)) super.inlineTokens((part = firstPart(text)), tokens);
    return tokens;
  }
}

/** Whether a table that begins with a text would have too many columns. */
export function hasManyColumns(text) {
  const [heads] = text.split("\n", 1);
  return heads.split("|", MAX_BARS + 2).length > MAX_BARS + 1;
}
