// Markdown to elements. No HTML is parsed: text becomes text nodes, HTML in it too, and pictures become links.

import { copy, el } from "../dashboard/dom.js";
import { pieces } from "./colours_of_code.js";
import { LexerWithBounds, hasManyColumns } from "./lexer_with_bounds.js";
import { formula } from "./math.js";
import { mathExtensions } from "./math_in_markdown.js";
import { Marked } from "./vendor/marked.js";

const { defaults } = new Marked({
  breaks: true,
  gfm: true,
  extensions: mathExtensions,
  tokenizer: { table: (text) => (hasManyColumns(text) ? undefined : false) }, // false: as the library does it
});

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp));/g;

function decoded(text) {
  return text.replace(ENTITY, (whole, decimal, hex, name) => {
    if (name) return ENTITIES[name];
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}

function link(href, content) {
  const isSafe = /^(https?:|mailto:)/i.test(href) && URL.canParse(href);
  return isSafe ? el("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...content) : el("span", {}, ...content);
}

function code({ text, lang }) {
  const [language] = (lang ?? "").toLowerCase().split(/[\s,{]/);
  const shown = pieces(text, language).map(([kind, piece]) => (kind ? el("span", { class: kind }, piece) : piece));
  const button = el("button", { type: "button", class: "quiet copy" }, "Copy code");
  button.addEventListener("click", () => copy(text, button));
  return [button, el("pre", { tabindex: 0 }, el("code", {}, ...shown))];
}

function table({ header, rows }) {
  const row = (cells, tag) =>
    el("tr", {}, ...cells.map(({ tokens, align }) => el(tag, align ? { class: align } : {}, ...elements(tokens))));
  return el("table", {}, el("thead", {}, row(header, "th")), el("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
}

function list({ ordered, start, items }) {
  const attributes = ordered && start !== 1 ? { start } : {};
  return el(ordered ? "ol" : "ul", attributes, ...items.map(({ tokens }) => el("li", {}, ...elements(tokens))));
}

function math({ raw, text, display }) {
  const made = text && formula(text, display);
  if (!made) return el("code", {}, raw.trim());
  return display ? el("span", { class: "formula", tabindex: 0 }, made) : made;
}

const wrapped = (tag) => ({ tokens }) => el(tag, {}, ...elements(tokens));

/** How each kind of token is shown; a kind that is not here is shown as its source. */
const SHOWN = {
  blockquote: wrapped("blockquote"),
  br: () => el("br"),
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  code,
  codespan: ({ text }) => el("code", {}, text),
  def: () => [],
  del: wrapped("del"),
  em: wrapped("em"),
  escape: ({ text }) => text,
  heading: ({ depth, tokens }) => el(`h${depth}`, {}, ...elements(tokens)),
  hr: () => el("hr"),
  html: ({ block, text }) => (block ? el("p", {}, text) : text),
  image: ({ href, text }) => link(href, [text || href]),
  link: ({ href, tokens }) => link(href, elements(tokens)),
  list,
  math,
  paragraph: wrapped("p"),
  space: () => [],
  strong: wrapped("strong"),
  table,
  text: ({ text, tokens }) => (tokens ? elements(tokens) : decoded(text)),
};

function elements(tokens) {
  return tokens.flatMap((token) => SHOWN[token.type]?.(token) ?? token.raw);
}

const DECIDED = 5; // characters from which a block can no longer become a part of the one before it

/** A text that grows. Blocks that are complete are made once; only the last one is made again. */
export class Growing {
  constructor(element) {
    this.element = element;
    this.begun = "";
    this.last = [];
  }

  /** Show the text so far, of which what was shown before is the beginning. */
  show(text) {
    const rest = text.slice(this.begun.length);
    let shown;
    try {
      const tokens = new LexerWithBounds(defaults).lex(rest);
      shown = tokens.map((token) => ({ raw: token.raw, nodes: elements([token]) }));
    } catch (error) {
      console.error(error);
      shown = [{ raw: rest, nodes: [rest] }]; // a mistake here must not hide the conversation
    }
    const isDecided = (shown.at(-1)?.raw.trim().length ?? 0) >= DECIDED;
    const complete = isDecided ? shown.slice(0, -1) : [];
    for (const node of this.last) node.remove();
    for (const { raw, nodes } of complete) {
      this.element.append(...nodes);
      this.begun += raw;
    }
    if (!text.startsWith(this.begun)) this.begun = text.slice(0, this.begun.length); // the lexer has normalized it
    const first = this.element.childNodes.length;
    this.element.append(...shown.slice(complete.length).flatMap(({ nodes }) => nodes));
    this.last = [...this.element.childNodes].slice(first);
  }
}
