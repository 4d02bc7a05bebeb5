// Formulas in the TeX that models write, as MathML. What is not known here is left to the caller, as its source.

const MAX_CHARS = 4000;
const MAX_DEPTH = 40;

const words = (text) => text.trim().split(/\s+/);
/** A table of "name character name character …". */
const table = (text) => new Map(words(text).map((each, i, all) => (i % 2 ? null : [each, all[i + 1]])).filter(Boolean));

const LETTERS = table(`alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι
  kappa κ lambda λ mu μ nu ν xi ξ pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ
  psi ψ omega ω ell ℓ imath ı jmath ȷ hbar ℏ Re ℜ Im ℑ aleph ℵ wp ℘ partial ∂ infty ∞ nabla ∇ emptyset ∅
  varnothing ∅ top ⊤ bot ⊥ angle ∠ triangle △ prime ′ degree ° hslash ℏ dots … ldots … cdots ⋯ vdots ⋮ ddots ⋱ dotsc …
  dotsb ⋯ checkmark ✓ square □ blacksquare ■ Box □ star ⋆ forall ∀ exists ∃ nexists ∄`);
const CAPITALS = table(`Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω`);
const OPERATORS = table(`cdot ⋅ times × div ÷ pm ± mp ∓ ast ∗ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ cup ∪ cap ∩
  setminus ∖ wedge ∧ land ∧ vee ∨ lor ∨ neg ¬ lnot ¬ le ≤ leq ≤ leqslant ⩽ ge ≥ geq ≥ geqslant ⩾ ll ≪ gg ≫ ne ≠ neq ≠
  equiv ≡ approx ≈ sim ∼ simeq ≃ cong ≅ propto ∝ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ subsetneq ⊊
  parallel ∥ perp ⊥ mid ∣ nmid ∤ to → rightarrow → gets ← leftarrow ← leftrightarrow ↔ Rightarrow ⇒ implies ⟹
  Leftarrow ⇐ impliedby ⟸ Leftrightarrow ⇔ iff ⟺ Longrightarrow ⟹ longrightarrow ⟶ Longleftrightarrow ⟺ mapsto ↦
  longmapsto ⟼ uparrow ↑ downarrow ↓ nearrow ↗ searrow ↘ hookrightarrow ↪ rightleftharpoons ⇌ leadsto ⇝ models ⊨ vdash ⊢
  therefore ∴ because ∵ triangleq ≜ coloneqq ≔ colon : prec ≺ succ ≻ asymp ≍ doteq ≐ dagger † backslash ∖ # # $ $ % %
  & & _ _`);
const SUMS = table(`sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀`);
const INTEGRALS = table(`int ∫ iint ∬ iiint ∭ oint ∮`);
const FENCES = table(`{ { } } lbrace { rbrace } | ‖ Vert ‖ lVert ‖ rVert ‖ vert | lvert | rvert | langle ⟨ rangle ⟩ lfloor ⌊
  rfloor ⌋ lceil ⌈ rceil ⌉ lbrack [ rbrack ]`);
const ACCENTS = table(`hat ^ widehat ^ bar ¯ vec → dot ˙ ddot ¨ tilde ~ widetilde ~ check ˇ acute ´ grave \` overline ‾
  overrightarrow → overbrace ⏞`);
const UNDER = table(`underline _ underbrace ⏟`);
const FUNCTIONS = new Set(words(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp arg deg dim ker
  hom`));
const LIMITS = new Set(words(`lim limsup liminf max min sup inf argmax argmin gcd det Pr`));
const SPACES = new Map([[",", 0.17], [":", 0.22], [">", 0.22], [";", 0.28], ["!", -0.17], [" ", 0.33], ["quad", 1], ["qquad", 2]]);
const IGNORED = new Set(words("displaystyle textstyle scriptstyle limits nolimits hline nonumber notag"));
const SIZES = /^[bB]ig{1,2}[lrm]?$/;
const TEXTS = new Set(words("text textrm textbf textit texttt textsf mbox"));
/** First code points of A, a and 0 in an alphabet, and the letters that Unicode has elsewhere. */
const FONTS = {
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce],
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, table("C ℂ H ℍ N ℕ P ℙ Q ℚ R ℝ Z ℤ")],
  mathcal: [0x1d49c, 0, 0, table("B ℬ E ℰ F ℱ H ℋ I ℐ L ℒ M ℳ R ℛ")],
  mathfrak: [0x1d504, 0x1d51e, 0, table("C ℭ H ℌ I ℑ R ℜ Z ℨ")],
  mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2],
  mathtt: [0x1d670, 0x1d68a, 0x1d7f6],
  mathrm: null,
  operatorname: null,
};
Object.assign(FONTS, { bm: FONTS.mathbf, boldsymbol: FONTS.mathbf, mathscr: FONTS.mathcal });
/** Environments: what stands before and after the table, and how its columns are aligned. */
const TABLES = {
  matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"],
  smallmatrix: ["", ""], array: ["", ""], gathered: ["", ""], gather: ["", ""], equation: ["", ""],
  cases: ["{", "", "left"], aligned: ["", "", "pairs"], align: ["", "", "pairs"], split: ["", "", "pairs"],
};

class Unknown extends Error {}

function make(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/1998/Math/MathML", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const row = (nodes) => (nodes.length === 1 ? nodes[0] : make("mrow", {}, ...nodes));
const mo = (text, attributes = {}) => make("mo", attributes, text);
const fence = (text) => mo(text, { stretchy: "false" });

function inFont(text, font) {
  if (!font) return text;
  const [capital, small, digit, elsewhere] = font;
  return [...text].map((c) => {
    const first = /[A-Z]/.test(c) ? [capital, 65] : /[a-z]/.test(c) ? [small, 97] : /[0-9]/.test(c) ? [digit, 48] : [0];
    return elsewhere?.get(c) ?? (first[0] ? String.fromCodePoint(first[0] + c.charCodeAt(0) - first[1]) : c);
  }).join("");
}

class Parser {
  constructor(text, display) {
    this.tokens = text.match(/\\[a-zA-Z]+\*?|\\[^]|\d+(?:\.\d+)?|\s+|[^]/gu) ?? [];
    this.at = 0;
    this.depth = 0;
    this.display = display;
  }

  get next() {
    while (/^\s/.test(this.tokens[this.at] ?? "")) this.at++;
    return this.tokens[this.at];
  }

  take(wanted) {
    const found = this.next;
    if (found === undefined || (wanted && found !== wanted)) throw new Unknown();
    this.at++;
    return found;
  }

  takeIf(wanted) {
    return this.next === wanted && this.take();
  }

  deeper(work) {
    if (++this.depth > MAX_DEPTH) throw new Unknown();
    const found = work();
    this.depth--;
    return found;
  }

  /** The nodes until one of `ends`, which is not taken. */
  nodes(...ends) {
    return this.deeper(() => {
      const found = [];
      while (this.next !== undefined && !ends.includes(this.next)) found.push(...this.scripted());
      if (ends.length && this.next === undefined) throw new Unknown();
      return found;
    });
  }

  /** A group in braces, or one token. */
  argument() {
    if (this.next !== "{") return this.deeper(() => row(this.atom()));
    this.take();
    const found = row(this.nodes("}"));
    this.take("}");
    return found;
  }

  /** A group in braces as text. */
  text() {
    this.take("{");
    let found = "";
    for (let open = 1; ; ) {
      const token = this.tokens[this.at++];
      if (token === undefined) throw new Unknown();
      open += token === "{" ? 1 : token === "}" ? -1 : 0;
      if (!open) return found;
      found += token.replace(/^\\(?=[^a-zA-Z])/, "");
    }
  }

  scripted() {
    const base = this.atom();
    const last = base.pop() ?? make("mrow", {});
    let [below, above, primes] = [null, null, ""];
    for (;;) {
      if (!below && this.takeIf("_")) below = this.argument();
      else if (!above && this.takeIf("^")) above = this.argument();
      else if (this.takeIf("'")) primes += "′";
      else if (["\\limits", "\\nolimits"].includes(this.next)) this.take();
      else break;
    }
    if (primes) above = row([mo(primes), ...(above ? [above] : [])]);
    if (!below && !above) return base.concat(last.childNodes.length || last.localName === "mspace" ? last : []);
    const [sub, sup, both] = last.under || (last.limits && this.display) ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (below && above) return [...base, make(both, {}, last, below, above)];
    return [...base, make(below ? sub : sup, {}, last, below ?? above)];
  }

  atom() {
    const token = this.take();
    if (token === "{") {
      this.at--;
      return [this.argument()];
    }
    if (token.startsWith("\\")) return this.command(token.slice(1));
    if (/^\d/.test(token)) return [make("mn", {}, token)];
    if (/^\p{L}$/u.test(token)) return [make("mi", {}, token)];
    if ("()[]|".includes(token)) return [fence(token)];
    if (token === "~") return [make("mspace", { width: "0.33em" })];
    if ("}^_&#$%".includes(token)) throw new Unknown();
    return [mo({ "-": "−", "*": "∗", "'": "′" }[token] ?? token)];
  }

  command(name) {
    const limited = (node) => [Object.assign(node, { limits: true })];
    if (LETTERS.has(name)) return [make("mi", {}, LETTERS.get(name))];
    if (CAPITALS.has(name)) return [make("mi", { mathvariant: "normal" }, CAPITALS.get(name))];
    if (OPERATORS.has(name)) return [mo(OPERATORS.get(name))];
    if (FENCES.has(name)) return [fence(FENCES.get(name))];
    if (SUMS.has(name)) return limited(mo(SUMS.get(name), { movablelimits: "false" }));
    if (INTEGRALS.has(name)) return [mo(INTEGRALS.get(name))];
    if (FUNCTIONS.has(name)) return [make("mi", {}, name), mo("\u2061")].slice(0, this.next === "^" || this.next === "_" ? 1 : 2);
    if (LIMITS.has(name)) return limited(make("mi", {}, name));
    if (SPACES.has(name)) return [make("mspace", { width: `${SPACES.get(name)}em` })];
    if (IGNORED.has(name)) return [];
    if (SIZES.test(name)) return [mo(this.delimiter())];
    if (ACCENTS.has(name)) return this.under("mover", { accent: "true" }, this.argument(), mo(ACCENTS.get(name)), name);
    if (UNDER.has(name)) return this.under("munder", {}, this.argument(), mo(UNDER.get(name)), name);
    if (TEXTS.has(name)) return [make("mtext", {}, this.text().replace(/ /g, "\u00a0"))];
    if (Object.hasOwn(FONTS, name.replace("*", ""))) return limitedIf(name.endsWith("*"), this.font(name.replace("*", "")));
    if (/^[dtc]?frac$/.test(name)) return [make("mfrac", {}, this.argument(), this.argument())];
    if (/^[dt]?binom$/.test(name))
      return [row([mo("("), make("mfrac", { linethickness: "0" }, this.argument(), this.argument()), mo(")")])];
    if (name === "sqrt") return [this.root()];
    if (name === "left") return [this.fenced()];
    if (name === "begin") return [this.environment()];
    if (name === "not") return [mo(`${this.atom().at(-1).textContent}\u0338`)];
    if (name === "bmod") return [mo("mod")];
    if (name === "pmod") return [row([mo("("), mo("mod"), this.argument(), mo(")")])];
    if (name === "boxed") return [make("mrow", { class: "boxed" }, this.argument())];
    if (name === "overset" || name === "stackrel") {
      const above = this.argument();
      return [make("mover", {}, this.argument(), above)];
    }
    if (name === "underset") {
      const below = this.argument();
      return [make("munder", {}, this.argument(), below)];
    }
    if (name === "xrightarrow" || name === "xleftarrow")
      return [make("mover", {}, mo(name === "xrightarrow" ? "→" : "←"), this.argument())];
    throw new Unknown();
  }

  /** Something over or under a base. Braces take their scripts as a text of their own. */
  under(tag, attributes, base, sign, name) {
    return [Object.assign(make(tag, attributes, base, sign), { under: name.endsWith("brace") })];
  }

  font(name) {
    const text = this.next === "{" ? this.text() : this.take();
    if (/^[\p{L}\d ]*$/u.test(text)) {
      const shown = inFont(text, FONTS[name]);
      return /^\d/.test(text) ? make("mn", {}, shown) : make("mi", [...text].length === 1 && shown === text ? { mathvariant: "normal" } : {}, shown);
    }
    return row(parsed(text, this.display, this.depth));
  }

  delimiter() {
    const token = this.take();
    if (token === ".") return "";
    const found = token.startsWith("\\") ? FENCES.get(token.slice(1)) : "()[]|/<>".includes(token) && token;
    if (!found) throw new Unknown();
    return { "<": "⟨", ">": "⟩" }[found] ?? found;
  }

  fenced() {
    const found = [mo(this.delimiter(), { fence: "true" })];
    for (;;) {
      found.push(...this.nodes("\\right", "\\middle"));
      const end = this.take();
      found.push(mo(this.delimiter(), { fence: "true" }));
      if (end === "\\right") return row(found);
    }
  }

  root() {
    if (!this.takeIf("[")) return make("msqrt", {}, this.argument());
    const degree = row(this.nodes("]"));
    this.take("]");
    return make("mroot", {}, this.argument(), degree);
  }

  environment() {
    const name = this.text();
    const kind = name.replace("*", "");
    if (!Object.hasOwn(TABLES, kind)) throw new Unknown();
    const [before, after, columns] = TABLES[kind];
    if (name === "array") this.text();
    const made = this.rows(columns, "\\end");
    this.take("\\end");
    if (this.text() !== name) throw new Unknown();
    return row([...(before ? [mo(before, { fence: "true" })] : []), made, ...(after ? [mo(after, { fence: "true" })] : [])]);
  }

  /** A table until `end`, which is not taken, or until the text does. */
  rows(columns, ...end) {
    const cells = [[]];
    for (;;) {
      const at = cells.at(-1).length;
      const align = { left: "left", pairs: at % 2 ? "left" : "right" }[columns];
      cells.at(-1).push(make("mtd", align ? { class: align } : {}, ...this.nodes("&", "\\\\", "\\cr", ...end)));
      if (this.takeIf("&")) continue;
      if (!this.takeIf("\\\\") && !this.takeIf("\\cr")) break;
      if (end.includes(this.next)) break;
      cells.push([]);
    }
    return make("mtable", columns === "pairs" ? { class: "pairs" } : {}, ...cells.map((each) => make("mtr", {}, ...each)));
  }
}

const limitedIf = (limits, node) => [Object.assign(node, { limits })];

function parsed(text, display, depth = 0) {
  const parser = new Parser(text, display);
  parser.depth = depth;
  if (!parser.tokens.includes("\\\\") || text.includes("\\begin")) return parser.nodes();
  parser.tokens.push("\\end");
  const found = parser.rows("", "\\end");
  if (parser.at !== parser.tokens.length - 1) throw new Unknown();
  return [found];
}

/** A formula as an element; null if it has something that is not known here. */
export function formula(text, display) {
  if (text.length > MAX_CHARS) return null;
  try {
    return make("math", display ? { display: "block" } : {}, row(parsed(text, display)));
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}
