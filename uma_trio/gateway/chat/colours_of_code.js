// What is a comment, a string, a number or a keyword in code of common languages. Pure.

const MAX_LENGTH = 50_000; // characters; longer code has no colours, so that a frame stays short

const words = (text) => new Set(text.split(" "));

const HASH = words("bash cmake console docker dockerfile elixir make makefile nix perl pl powershell ps1 py python python3 r rb ruby sh shell toml yaml yml zsh");
const SLASHES = words(
  "c c# c++ cc cpp cs csharp css cuda dart glsl go h hpp java javascript js json json5 jsonc jsx kotlin kt less mjs php proto rs rust scala scss solidity swift ts tsx typescript wgsl zig",
);
const DASHES = words("ada elm haskell hs lua sql");
const CHARACTERS = words("elm haskell hs rs rust"); // where an apostrophe is not always a quote

const KEYWORDS = words(
  "abstract and as assert async await begin bool boolean break byte case catch char class const constexpr continue data " +
    "def default defer del delete do done double elif else elsif end enum esac except export extends extern false False fi " +
    "final finally float fn for foreach from func function global go goto if impl implements import in include inline " +
    "instanceof int interface is lambda let local long loop match mod module move mut namespace new nil None nonlocal not " +
    "null nullptr operator or override package pass private protected pub public raise readonly ref require return self " +
    "Self sealed short signed sizeof static str string struct super switch template then this throw throws trait true True " +
    "try type typedef typename typeof undefined union unless unsafe unsigned until use using val var virtual void volatile " +
    "when where while with yield",
);
const SQL = words(
  "add all alter and as asc between by case commit create cross default delete desc distinct drop else end exists foreign " +
    "from full group having if in index inner insert into is join key left like limit not null offset on or order outer " +
    "primary references replace right rollback select set table then transaction union unique update using values view when " +
    "where with",
);

const STRINGS = '"""[\\s\\S]*?(?:"""|$)|\'\'\'[\\s\\S]*?(?:\'\'\'|$)|"(?:\\\\.|[^"\\\\\\n])*"?|`(?:\\\\[\\s\\S]|[^`\\\\])*`?';
const QUOTED = "'(?:\\\\.|[^'\\\\\\n])*'?";
const CHARACTER = "'(?:\\\\[^\\n]{1,10}?|[^'\\\\\\n])'";
const REST = "(?<number>\\b\\d[\\w.]*)|(?<word>[\\p{L}_$][\\p{L}\\p{N}_$]*)";

function pattern(language) {
  const comments = [];
  if (SLASHES.has(language)) comments.push("//.*", "/\\*[\\s\\S]*?(?:\\*/|$)");
  if (HASH.has(language) || language === "php") comments.push("(?<![^\\s;])#.*");
  if (DASHES.has(language)) comments.push("--.*");
  if (!comments.length) return null;
  const strings = `${STRINGS}|${CHARACTERS.has(language) ? CHARACTER : QUOTED}`;
  return new RegExp(`(?<comment>${comments.join("|")})|(?<string>${strings})|${REST}`, "gu");
}

/** Code as pieces [kind, text], whose texts together are the code; the kind of the rest is "". */
export function pieces(code, language) {
  const found = code.length > MAX_LENGTH ? null : pattern(language);
  const made = [];
  let end = 0;
  for (const { 0: text, index, groups } of found ? code.matchAll(found) : []) {
    const isKeyword = language === "sql" ? SQL.has(text.toLowerCase()) : KEYWORDS.has(text);
    const kind = groups.comment ? "comment" : groups.string ? "string" : groups.number ? "number" : isKeyword ? "keyword" : "";
    if (!kind) continue;
    if (index > end) made.push(["", code.slice(end, index)]);
    made.push([kind, text]);
    end = index + text.length;
  }
  if (end < code.length) made.push(["", code.slice(end)]);
  return made;
}
