// Markdown to elements. HTML in it is shown as text, pictures become links, and what is made passes DOMPurify.

import { Marked } from "./vendor/marked.js";

const escaped = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const marked = new Marked({
  breaks: true,
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  },
});
const TAGS = "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" ");

function fragment(tokens) {
  const html = marked.parser(tokens);
  const made = DOMPurify.sanitize(html, { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "start", "align"], RETURN_DOM_FRAGMENT: true });
  for (const link of made.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const pre of made.querySelectorAll("pre")) {
    pre.tabIndex = 0;
    const copy = Object.assign(document.createElement("button"), { type: "button", className: "quiet copy", textContent: "Copy code" });
    copy.addEventListener("click", () => navigator.clipboard?.writeText(pre.textContent));
    pre.before(copy);
  }
  return made;
}

/** A text that grows. Blocks that are complete are made once; only the last one is made again. */
export class Growing {
  constructor(element) {
    this.element = element;
    this.begun = "";
    this.last = [];
  }

  /** Show the text so far, of which what was shown before is the beginning. */
  show(text) {
    const tokens = marked.lexer(text.slice(this.begun.length));
    for (const node of this.last) node.remove();
    for (const token of tokens.slice(0, -1)) {
      this.element.append(fragment([token]));
      this.begun += token.raw;
    }
    if (!text.startsWith(this.begun)) this.begun = text.slice(0, this.begun.length); // the lexer has normalized it
    const end = fragment(tokens.slice(-1));
    this.last = [...end.childNodes];
    this.element.append(end);
  }
}
