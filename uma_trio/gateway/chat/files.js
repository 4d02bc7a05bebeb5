// Files that are text, or have some: PDF files are read by a worker, so that one that takes long does not stop the page.

const MAX_BYTES = 8 * 1024 * 1024;
const PDF_MS = 20_000;

/** A file as Markdown, in a fence that it cannot end. */
export function fenced({ name, text }) {
  let ticks = 2;
  for (const [run] of text.matchAll(/`+/g)) ticks = Math.max(ticks, run.length);
  const fence = "`".repeat(ticks + 1);
  return `${name}:\n\n${fence}\n${text}\n${fence}`;
}

const FILE = /\n*([^\n]+\.\w{1,9}):\n\n(`{3,})\n/y;

/** The files that a message begins with, as `fenced` has written them, and the text after them. */
export function parted(content) {
  const files = [];
  let at = 0;
  for (;;) {
    FILE.lastIndex = at;
    const [head, name, fence] = FILE.exec(content) ?? [];
    const end = head ? content.indexOf(`\n${fence}`, at + head.length) : -1;
    if (end < 0) return { files, text: at ? content.slice(at).trimStart() : content };
    files.push({ name, text: content.slice(at + head.length, end) });
    at = end + 1 + fence.length;
  }
}

export const isPdf = ({ name, type }) => /\.pdf$/i.test(name) || type === "application/pdf";

const POLICIES = globalThis.trustedTypes ?? { createPolicy: (_, rules) => rules };
const READER = POLICIES.createPolicy("pdf", { createScriptURL: () => "chat/pdf.js" });

/** The text of a PDF file. Throws an error that says why it has none. */
async function textOfPdf(buffer) {
  const worker = new Worker(READER.createScriptURL(""), { type: "module" });
  try {
    return await new Promise((resolve, reject) => {
      worker.onmessage = ({ data: { text, problem } }) => (problem ? reject(new Error(problem)) : resolve(text));
      worker.onerror = () => reject(new Error("what reads PDF files does not work"));
      setTimeout(() => reject(new Error("it takes too long")), PDF_MS);
      worker.postMessage(buffer, [buffer]);
    });
  } finally {
    worker.terminate();
  }
}

/** The text of a file. Throws an error that says why it has none. */
export async function readText(file) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than ${MAX_BYTES / 1024 / 1024} MiB.`);
  if (isPdf(file)) {
    try {
      return await textOfPdf(await file.arrayBuffer());
    } catch (error) {
      throw new Error(`The text of ${file.name} cannot be read: ${error.message}.`);
    }
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    /* not UTF-8 */
  }
  throw new Error(`${file.name} is neither text, a PDF file, a picture nor sound.`);
}
