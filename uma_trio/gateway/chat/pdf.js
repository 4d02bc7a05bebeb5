// The text of PDF files: what it says, page by page, in the order in which it is drawn. A worker, which the page ends if it
// takes too long: the file decides how much work there is.
// Source: ISO 32000-1, 7 (syntax), 9.4 (text), 9.10 (extraction of text).

const MAX_INFLATED = 64 * 1024 * 1024; // bytes of all streams together
const MAX_CODE = 0xffff; // of a font
const MAX_DEPTH = 50; // of arrays, and of the tree of pages
const MAX_FORMS = 5; // in each other
const WHITE = /[\0\t\n\f\r ]/;
const DELIMITER = /[\0\t\n\f\r ()<>[\]{}/%]/;

class Name extends String {}
class Text extends String {} // its characters are bytes
class Reference extends String {}
class Operator extends String {}

function latin1(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
  return text;
}

// -- objects --

const ESCAPES = { n: "\n", r: "\r", t: "\t", b: "\b", f: "\f" };

/** Reads values from a text whose characters are bytes. */
class Reader {
  constructor(text, at = 0) {
    Object.assign(this, { text, at });
  }

  skip() {
    for (;;) {
      while (this.at < this.text.length && WHITE.test(this.text[this.at])) this.at++;
      if (this.text[this.at] !== "%") return;
      while (this.at < this.text.length && !/[\r\n]/.test(this.text[this.at])) this.at++;
    }
  }

  word() {
    const begin = this.at;
    while (this.at < this.text.length && !DELIMITER.test(this.text[this.at])) this.at++;
    return this.text.slice(begin, this.at);
  }

  /** The next value; undefined at the end. Dictionaries are Maps. */
  value(depth = 0) {
    if (depth > MAX_DEPTH) throw new RangeError("it is nested too deep");
    this.skip();
    const { text } = this;
    if (this.at >= text.length) return undefined;
    const c = text[this.at];
    if (c === "/") {
      this.at++;
      return new Name(this.word().replace(/#([0-9a-fA-F]{2})/g, (_, hex) => String.fromCharCode(parseInt(hex, 16))));
    }
    if (c === "(") return this.string();
    if (text.startsWith("<<", this.at)) {
      this.at += 2;
      const items = this.items(">>", depth);
      return new Map(items.flatMap((key, i) => (i % 2 ? [] : [[String(key), items[i + 1]]])));
    }
    if (c === "<") {
      const end = text.indexOf(">", this.at);
      const digits = text.slice(this.at + 1, end < 0 ? text.length : end).replace(/[^0-9a-fA-F]/g, "");
      this.at = end < 0 ? text.length : end + 1;
      return new Text((digits.length % 2 ? `${digits}0` : digits).replace(/../g, (hex) => String.fromCharCode(parseInt(hex, 16))));
    }
    if (c === "[") {
      this.at++;
      return this.items("]", depth);
    }
    const found = /^(\d+)[\0\t\n\f\r ]+(\d+)[\0\t\n\f\r ]+R(?![a-zA-Z])/.exec(text.slice(this.at, this.at + 40));
    if (found) {
      this.at += found[0].length;
      return new Reference(found[1]);
    }
    const word = this.word();
    if (!word) this.at++; // a delimiter that belongs to nothing
    return /^[+-]?(\d+\.?\d*|\.\d+)$/.test(word) ? Number(word) : new Operator(word || c);
  }

  items(end, depth) {
    const found = [];
    for (;;) {
      this.skip();
      if (this.at >= this.text.length) return found;
      if (this.text.startsWith(end, this.at)) {
        this.at += end.length;
        return found;
      }
      found.push(this.value(depth + 1));
    }
  }

  string() {
    let made = "";
    for (let open = 1, i = this.at + 1; ; i++) {
      const c = this.text[i];
      this.at = i + 1;
      if (c === undefined) break;
      if (c === "\\") {
        const octal = /^[0-7]{1,3}/.exec(this.text.slice(i + 1, i + 4))?.[0];
        const next = this.text[i + 1] ?? "";
        made += octal ? String.fromCharCode(parseInt(octal, 8) & 255) : /[\r\n]/.test(next) ? "" : ESCAPES[next] ?? next;
        i += octal ? octal.length : 1;
        continue;
      }
      if (c === "(") open++;
      if (c === ")" && --open === 0) break;
      made += c;
    }
    return new Text(made);
  }
}

// -- the file --

function ascii85(text) {
  const digits = text.replace(/[\0\t\n\f\r ]/g, "").replace(/^<~/, "").replace(/~>?.*$/, "").replace(/z/g, "!!!!!");
  const bytes = [];
  for (let i = 0; i < digits.length; i += 5) {
    const group = digits.slice(i, i + 5);
    let n = 0;
    for (const c of group.padEnd(5, "u")) n = n * 85 + c.charCodeAt(0) - 33;
    bytes.push(...[n >>> 24, n >>> 16, n >>> 8, n].map((each) => each & 255).slice(0, group.length - 1));
  }
  return Uint8Array.from(bytes);
}

class PdfFile {
  constructor(bytes) {
    Object.assign(this, { bytes, text: latin1(bytes), objects: new Map(), room: MAX_INFLATED });
  }

  /** Find all objects, without the table of them: it is often damaged, and may be compressed. */
  async read() {
    let hasMore = true;
    const begins = /(\d+)[\0\t\n\f\r ]+\d+[\0\t\n\f\r ]+obj\b/g;
    for (let found; (found = begins.exec(this.text)); ) {
      const reader = new Reader(this.text, begins.lastIndex);
      const value = reader.value();
      reader.skip();
      if (value instanceof Map && this.text.startsWith("stream", reader.at)) {
        value.begin = reader.at + 6 + (this.text[reader.at + 6] === "\r" ? 2 : 1);
        value.end = this.endOf(value, value.get("Length"));
        if (value.end === undefined && hasMore) {
          value.end = this.text.indexOf("endstream", value.begin);
          hasMore = value.end >= 0;
          if (this.text[value.end - 1] === "\n") value.end--;
          if (this.text[value.end - 1] === "\r") value.end--;
        }
        value.end = Math.max(value.begin, value.end ?? 0);
        reader.at = value.end;
      }
      this.objects.set(found[1], value);
      begins.lastIndex = Math.max(reader.at, begins.lastIndex);
    }
    for (const each of [...this.objects.values()]) if (this.is(each, "ObjStm")) await this.readPacked(each);
  }

  /** Where a stream of this length ends; undefined if that is not its length. */
  endOf(stream, length) {
    const end = stream.begin + length;
    return typeof length === "number" && /^\s*endstream/.test(this.text.slice(end, end + 12)) ? end : undefined;
  }

  is(value, type) {
    return value instanceof Map && String(this.get(value.get("Type")) ?? "") === type;
  }

  /** Objects in a stream. */
  async readPacked(stream) {
    const text = await this.content(stream);
    const numbers = new Reader(text);
    const first = this.get(stream.get("First"));
    for (let i = this.get(stream.get("N")); i > 0; i--) {
      const [id, offset] = [numbers.value(), numbers.value()];
      if (typeof offset !== "number") return;
      if (!this.objects.has(String(id))) this.objects.set(String(id), new Reader(text, first + offset).value());
    }
  }

  get(value) {
    for (let i = 0; value instanceof Reference && i < MAX_DEPTH; i++) value = this.objects.get(String(value));
    return value;
  }

  /** The decoded bytes of a stream, as a text; empty if its filter is not known, as those of pictures. */
  async content(stream) {
    if (!(stream instanceof Map) || stream.begin === undefined) return "";
    const end = this.endOf(stream, this.get(stream.get("Length"))) ?? stream.end;
    let bytes = this.bytes.subarray(stream.begin, end);
    for (const filter of [this.get(stream.get("Filter")) ?? []].flat()) {
      const name = String(this.get(filter));
      if (name === "FlateDecode" || name === "Fl") bytes = await this.inflated(bytes);
      else if (name === "ASCII85Decode" || name === "A85") bytes = ascii85(latin1(bytes));
      else return "";
    }
    return latin1(bytes);
  }

  async inflated(bytes) {
    const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")).getReader();
    const parts = [];
    try {
      for (let part; !(part = await reader.read()).done; ) {
        this.room -= part.value.length;
        if (this.room < 0) throw new RangeError("it is too large");
        parts.push(part.value);
      }
    } catch (error) {
      if (error instanceof RangeError) throw error; // what comes after the end of a stream is an error, and no loss
    }
    return new Uint8Array(await new Blob(parts).arrayBuffer());
  }

  /** The pages in their order, each with the resources that it may inherit. */
  pages() {
    const all = [...this.objects.values()];
    const found = [];
    const seen = new Set();
    const walk = (node, resources, depth) => {
      node = this.get(node);
      if (!(node instanceof Map) || depth > MAX_DEPTH || seen.has(node)) return;
      seen.add(node);
      const own = this.get(node.get("Resources")) ?? resources;
      if (node.has("Kids")) for (const each of [this.get(node.get("Kids")) ?? []].flat()) walk(each, own, depth + 1);
      else found.push([node, own]);
    };
    walk(all.findLast((each) => this.is(each, "Catalog"))?.get("Pages"), undefined, 0);
    return found.length ? found : all.filter((each) => this.is(each, "Page")).map((page) => [page, this.get(page.get("Resources"))]);
  }
}

// -- fonts --

const PUNCTUATION =
  "space exclam quotedbl numbersign dollar percent ampersand quotesingle parenleft parenright asterisk plus comma hyphen period slash " +
  "zero one two three four five six seven eight nine colon semicolon less equal greater question at";
const GLYPHS = new Map(PUNCTUATION.split(" ").map((name, i) => [name, String.fromCharCode(32 + i)]));
const OTHERS = "bracketleft [ backslash \\ bracketright ] underscore _ braceleft { bar | braceright } endash – emdash — bullet • minus − " +
  "quoteleft ‘ quoteright ’ quotedblleft “ quotedblright ” ff ff fi fi fl fl ffi ffi ffl ffl germandbls ß adieresis ä odieresis ö udieresis ü";
OTHERS.split(" ").forEach((each, i, all) => i % 2 || GLYPHS.set(each, all[i + 1]));

function glyph(name) {
  if (name.length === 1) return name;
  const hex = /^(?:uni|u)([0-9A-F]{4,6})$/.exec(name)?.[1];
  return hex ? String.fromCodePoint(Math.min(parseInt(hex, 16), 0x10ffff)) : GLYPHS.get(name);
}

const number = (bytes) => [...String(bytes)].reduce((n, c) => n * 256 + c.charCodeAt(0), 0);
const utf16 = (bytes) => String(bytes).replace(/([^])([^])/g, (_, a, b) => String.fromCharCode(a.charCodeAt(0) * 256 + b.charCodeAt(0)));

/** What codes mean, by a ToUnicode map. */
function readMap(text, codes) {
  const reader = new Reader(text);
  let section = "";
  for (let a; (a = reader.value()) !== undefined; ) {
    if (a instanceof Operator) section = String(a);
    if (!(a instanceof Text) || !/^beginbf/.test(section)) continue;
    const b = reader.value();
    if (section === "beginbfchar") codes.set(number(a), utf16(b));
    else {
      const [first, last, to] = [number(a), Math.min(number(b), MAX_CODE), reader.value()];
      for (let code = first; code <= last; code++) {
        if (Array.isArray(to)) codes.set(code, utf16(to[code - first] ?? ""));
        else if (to instanceof Text) codes.set(code, utf16(to).replace(/[^]$/, (c) => String.fromCharCode(c.charCodeAt(0) + code - first)));
      }
    }
  }
}

function simpleWidths(file, font) {
  const first = file.get(font.get("FirstChar")) ?? 0;
  return new Map([file.get(font.get("Widths")) ?? []].flat().map((each, i) => [first + i, Number(file.get(each))]));
}

/** Widths are written as `code [width width …]` or `first last width`. */
function compositeWidths(file, font) {
  const found = new Map();
  const descendant = file.get(file.get(font.get("DescendantFonts"))?.[0]);
  const all = file.get(descendant?.get("W")) ?? [];
  for (let i = 0; i + 1 < all.length; ) {
    const [code, next] = [Number(file.get(all[i])), file.get(all[i + 1])];
    if (Array.isArray(next)) next.forEach((each, j) => found.set(code + j, Number(file.get(each))));
    else for (let j = code; j <= Math.min(Number(next), MAX_CODE); j++) found.set(j, Number(file.get(all[i + 2])));
    i += Array.isArray(next) ? 2 : 3;
  }
  return found;
}

const windows1252 = new TextDecoder("windows-1252");

async function readFont(file, font) {
  const isComposite = String(file.get(font.get("Subtype"))) === "Type0";
  const codes = new Map();
  const map = file.get(font.get("ToUnicode"));
  if (map instanceof Map) readMap(await file.content(map), codes);
  let at = 0;
  for (const each of file.get(file.get(font.get("Encoding"))?.get?.("Differences")) ?? []) {
    if (typeof each === "number") at = each;
    else if (!codes.has(at++)) codes.set(at - 1, glyph(String(each)) ?? "");
  }
  const widths = isComposite ? compositeWidths(file, font) : simpleWidths(file, font);
  const scale = String(file.get(font.get("Subtype"))) === "Type3" ? (file.get(font.get("FontMatrix"))?.[0] ?? 0.001) : 0.001;
  return (bytes) => {
    const found = [];
    for (let i = 0; i < bytes.length; i += isComposite ? 2 : 1) {
      const code = isComposite ? number(bytes.slice(i, i + 2)) : bytes.charCodeAt(i);
      const text = codes.get(code) ?? (isComposite ? "" : windows1252.decode(Uint8Array.of(code)));
      found.push([text, (widths.get(code) ?? 500) * scale]);
    }
    return found;
  };
}

// -- pages --

const times = ([a, b, c, d, e, f], [A, B, C, D, E, F]) => [a * A + b * C, a * B + b * D, c * A + d * C, c * B + d * D, e * A + f * C + E, e * B + f * D + F];

/** Writes the text of a page; where a new word and a new line begin follows from where it is drawn. */
class Page {
  constructor(file) {
    Object.assign(this, { file, text: "", fonts: new Map(), last: null });
  }

  async draw(content, resources, matrix, depth = 0) {
    const { file } = this;
    const reader = new Reader(content);
    const kept = [];
    let [args, font, size, leading] = [[], null, 1, 0];
    let [at, begin] = [[1, 0, 0, 1, 0, 0], [1, 0, 0, 1, 0, 0]];
    const move = (x, y) => (at = begin = times([1, 0, 0, 1, x, y], begin));
    const show = (bytes) => {
      for (const [made, width] of font?.(String(bytes)) ?? []) {
        this.put(made, times(at, matrix), size, width);
        at = times([1, 0, 0, 1, width * size, 0], at);
      }
    };
    for (let value; (value = reader.value()) !== undefined; ) {
      if (!(value instanceof Operator)) {
        args.push(value);
        continue;
      }
      const [a, b] = args;
      const name = String(value);
      if (name === "q") kept.push([matrix, font, size, leading]);
      else if (name === "Q" && kept.length) [matrix, font, size, leading] = kept.pop();
      else if (name === "cm" && args.length === 6) matrix = times(args, matrix);
      else if (name === "BT") at = begin = [1, 0, 0, 1, 0, 0];
      else if (name === "Tf") [font, size] = [await this.font(resources, String(a)), Number(b) || 1];
      else if (name === "TL") leading = Number(a);
      else if (name === "Tm" && args.length === 6) at = begin = args;
      else if (name === "Td") move(Number(a), Number(b));
      else if (name === "TD") {
        leading = -Number(b);
        move(Number(a), -leading);
      } else if (name === "T*") move(0, -leading);
      else if (name === "Tj") show(a ?? "");
      else if (name === "'" || name === '"') {
        move(0, -leading);
        show(args.at(-1) ?? "");
      } else if (name === "TJ") {
        for (const each of Array.isArray(a) ? a : []) {
          if (typeof each === "number") at = times([1, 0, 0, 1, (-each / 1000) * size, 0], at);
          else show(each);
        }
      } else if (name === "Do" && depth < MAX_FORMS) {
        const form = file.get(file.get(resources?.get("XObject"))?.get(String(a)));
        if (form instanceof Map && String(file.get(form.get("Subtype"))) === "Form") {
          const inner = times(file.get(form.get("Matrix")) ?? [1, 0, 0, 1, 0, 0], matrix);
          await this.draw(await file.content(form), file.get(form.get("Resources")) ?? resources, inner, depth + 1);
        }
      } else if (name === "ID") {
        const end = reader.text.slice(reader.at).search(/[\s]EI[\s]/); // the bytes of a small picture
        reader.at = end < 0 ? reader.text.length : reader.at + end + 3;
      }
      args = [];
    }
  }

  async font(resources, name) {
    const font = this.file.get(this.file.get(resources?.get("Font"))?.get(name));
    if (!(font instanceof Map)) return null;
    if (!this.fonts.has(font)) this.fonts.set(font, await readFont(this.file, font));
    return this.fonts.get(font);
  }

  put(text, [a, b, , , x, y], size, width) {
    const height = size * Math.hypot(a, b) || 1;
    if (this.last) {
      const [dx, dy] = [x - this.last.x, Math.abs(y - this.last.y)];
      if (dy > height * 2) this.text += "\n\n";
      else if (dy > height * 0.5) this.text += "\n";
      else if (Math.abs(dx) > height * 0.15 && !/\s$/.test(this.text) && !/^\s/.test(text)) this.text += " ";
    }
    this.text += text;
    this.last = { x: x + width * height, y };
  }
}

async function textOf(file) {
  await file.read();
  const fonts = new Map();
  const texts = [];
  const pages = file.pages();
  if (!pages.length) throw new Error("it is damaged");
  for (const [page, resources] of pages) {
    const made = Object.assign(new Page(file), { fonts });
    let content = "";
    for (const each of [file.get(page.get("Contents")) ?? []].flat()) content += `${await file.content(file.get(each))}\n`;
    await made.draw(content, resources, [1, 0, 0, 1, 0, 0]);
    texts.push(made.text.replace(/[ \t]+\n/g, "\n").trim());
  }
  return texts.join("\n\n").trim();
}

/** The text of a PDF file. Throws an error that says why it has none. */
export async function textOfPdf(buffer) {
  const file = new PdfFile(new Uint8Array(buffer));
  if (!file.text.slice(0, 1024).includes("%PDF-")) throw new Error("it is no PDF file");
  if (/\/Encrypt[\0\t\n\f\r ]*(\d|<<)/.test(file.text)) throw new Error("it is encrypted");
  const text = await textOf(file).catch((error) => {
    if (error instanceof TypeError) throw new Error("it is damaged"); // something is not of the type that belongs there
    throw error;
  });
  if (!text) throw new Error("it has no text, only pictures of it, perhaps");
  return text;
}

if (!globalThis.document) {
  onmessage = async ({ data }) =>
    postMessage(await textOfPdf(data).then((text) => ({ text }), ({ message }) => ({ problem: message })));
}
