// What one types before it is sent: the text, attached files, and how many tokens they are. It is kept in the browser.

import { Refused, request } from "../dashboard/api.js";
import { byId, count, counted, el, setText } from "../dashboard/dom.js";
import { rootOf } from "./branches.js";
import { contentOf, textOf } from "./content.js";
import { fenced, isPdf, readText } from "./files.js";
import { button } from "./message.js";
import { has, showSenses } from "./models.js";
import { owned } from "./owner.js";
import { base64, isPicture, readPicture, thumbnail } from "./pictures.js";
import { isSound, player, readSound, record } from "./sound.js";

const LARGE_PASTE = 20_000; // characters; more of them become a file
const COUNTED = 400; // characters from which tokens are counted before they are sent
const SETTLED_MS = 500; // after the last key

function mediaIn({ picture, sound }) {
  if (picture) return [{ type: "image", data: picture }];
  return sound ? [{ type: "audio", data: sound }] : [];
}

/** The content of the message that a draft becomes, with the files that are text in its text; empty if there is none. */
export function contentOfDraft({ text, files }) {
  const texts = files.filter((file) => file.text !== undefined).map(fenced);
  return contentOf([...texts, text.trim()].filter(Boolean).join("\n\n"), files.flatMap(mediaIn));
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null; // what another version has kept
  }
}

const draftKey = (id) => owned(`draft ${rootOf(id)}`);
const sentKey = (id) => owned(`sent ${id}`);

const newKey = () => draftKey(""); // of a chat that has no name yet, so each tab has its own
const leftKey = () => owned("drafts"); // those of new chats, whose tabs were closed
const storageOf = (key) => (key === newKey() ? sessionStorage : localStorage);

const left = () => parsed(localStorage.getItem(leftKey())) ?? [];

/** Leave the draft of a new chat to the next tab, or to this one when it is loaded again. */
function leaveDraft() {
  const own = sessionStorage.getItem(newKey());
  if (own) localStorage.setItem(leftKey(), JSON.stringify([...left(), own]));
}

/** The draft of a new chat is that of this tab, or the last one that was left. */
function takeDraft() {
  const own = sessionStorage.getItem(newKey());
  const drafts = left();
  const at = own ? drafts.lastIndexOf(own) : drafts.length - 1;
  if (at < 0) return;
  const [taken] = drafts.splice(at, 1);
  sessionStorage.setItem(newKey(), taken);
  localStorage.setItem(leftKey(), JSON.stringify(drafts));
}

export class Composer {
  /** Args: a function for what the user should know, one that gives the fields of a request that name the model. */
  constructor(say, model) {
    Object.assign(this, { say, model, files: [], problems: [], id: "", isKept: true });
    this.large = new Map(); // what is too long for the browser to keep
    takeDraft();
    addEventListener("pagehide", () => {
      this.keepDraft();
      leaveDraft();
    });
    this.field = byId("prompt");
    this.field.addEventListener("input", () => this.changed());
    this.field.addEventListener("paste", (event) => this.paste(event));
    byId("attach").addEventListener("click", () => byId("files").click());
    byId("files").addEventListener("change", ({ target }) => {
      this.attach([...target.files]);
      target.value = "";
    });
    addEventListener("dragover", (event) => event.preventDefault());
    addEventListener("drop", (event) => {
      event.preventDefault();
      this.attach([...event.dataTransfer.files]);
    });
  }

  get key() {
    return draftKey(this.id);
  }

  /** What is written from now on is of another conversation. */
  moveTo(id) {
    this.keepDraft();
    this.id = id;
  }

  /** Show the draft of the conversation, and after it what was typed before it could be shown. */
  open(typed = "") {
    const { text = "", files = [] } = this.kept(this.key) ?? {};
    this.put({ text: [text, typed].filter(Boolean).join("\n"), files });
  }

  /** The content of the message to send; empty if there is none. */
  get content() {
    return contentOfDraft(this.draft);
  }

  get draft() {
    return { text: this.field.value, files: this.files };
  }

  /** Keep something, or nothing, in the browser; false if it is too long, and is kept until the page is closed. */
  keep(key, value) {
    this.large.delete(key);
    try {
      if (value) storageOf(key).setItem(key, JSON.stringify(value));
      else storageOf(key).removeItem(key);
      return true;
    } catch {
      this.large.set(key, value);
      return false;
    }
  }

  kept(key) {
    return this.large.get(key) ?? parsed(storageOf(key).getItem(key));
  }

  // -- what was sent, until it is in its session --

  keepSent(id, draft) {
    this.keep(sentKey(id), draft);
  }

  sent(id) {
    return this.kept(sentKey(id));
  }

  forgetSent(id) {
    this.keep(sentKey(id), null);
  }

  /** Put a draft back into the field; false if something else is there. */
  takeBack({ text, files }) {
    const isFree = this.field.value === "" && !this.files.length;
    if (isFree) this.put({ text, files });
    return isFree;
  }

  put({ text, files }) {
    this.field.value = text;
    this.files = files;
    this.changed();
  }

  add(file) {
    this.put({ ...this.draft, files: [...this.files, file] });
  }

  /** Show what has changed, and keep it: with files a moment later, so that no key has to wait for them. */
  changed() {
    const isQuick = !this.files.length || this.files !== this.shown;
    if (this.files !== this.shown) this.showFiles();
    this.counting?.abort();
    clearTimeout(this.timer);
    byId("tokens").textContent = "";
    this.isKept = false;
    if (isQuick) this.keepDraft();
    this.timer = setTimeout(() => {
      this.keepDraft();
      this.count(textOf({ content: this.content }));
    }, SETTLED_MS);
  }

  /** Keep what was typed before the key of this tab was known, as that of its owner. */
  keepForOwner() {
    this.isKept = !this.content;
    this.keepDraft();
  }

  keepDraft() {
    if (this.isKept) return;
    this.isKept = true;
    const { text, files } = this.draft;
    const fits = this.keep(this.key, text || files.length ? { text, files } : null);
    if (!fits) this.say("This is too long to be kept when the page is closed.");
  }

  showFiles() {
    this.shown = this.files;
    byId("attached").replaceChildren(
      ...this.files.map((file) => {
        const remove = button("×", () => this.remove(file), { "aria-label": `Remove ${file.name}` });
        if (file.picture) return el("li", {}, thumbnail(file.picture, file.name), file.name, remove);
        if (file.sound) return el("li", {}, player(file.sound, file.name), remove);
        return el("li", {}, `${file.name} · ${counted(file.text.length, "character")}`, remove);
      }),
    );
  }

  remove(file) {
    this.put({ ...this.draft, files: this.files.filter((each) => each !== file) });
    this.field.focus();
  }

  /** Say how many tokens a text is, unless it is short. */
  async count(text) {
    if (text.length < COUNTED) return;
    this.counting = new AbortController();
    try {
      const body = { text, add_special: false, parse_special: false, ...this.model() };
      const { tokens } = await (await request("v1/tokenize", { body, signal: this.counting.signal })).json();
      const room = this.room();
      const much = room && tokens.length > room ? `, more than the ${count(room)} that the model can read` : "";
      byId("tokens").textContent = `${count(tokens.length)} tokens${much}`;
    } catch (error) {
      if (error.name === "AbortError") return;
      byId("tokens").textContent = `${count(text.length)} characters. ${error instanceof Refused ? error.message : ""}`;
    }
  }

  /** Tokens that the model can read; undefined if it is not known. */
  room() {
    return Number(byId("model").selectedOptions[0]?.dataset.context) || undefined;
  }

  paste(event) {
    const text = event.clipboardData.getData("text/plain");
    const files = [...event.clipboardData.files].filter(({ name }) => !text || name !== "image.png"); // a text drawn by Office
    if (!files.length && text.length < LARGE_PASTE) return;
    event.preventDefault();
    if (files.length) this.attach(files);
    else this.add({ name: `Pasted text ${this.files.length + 1}.txt`, text });
  }

  async attach(files) {
    const before = this.problems;
    this.problems = [];
    for (const file of files) {
      if (isPdf(file)) this.say(`Reading ${file.name}`);
      try {
        this.add({ name: file.name, ...(await this.read(file)) });
      } catch (error) {
        this.problems.push(error.message);
      }
    }
    if (before.length || this.problems.length || files.some(isPdf)) this.say(this.problems.join(" "));
    this.field.focus();
  }

  async read(file) {
    if (!file.size) throw new Error(`${file.name} is empty.`);
    if (isSound(file)) {
      this.check("audio", "hear sound");
      return { sound: await base64(await readSound(file)) };
    }
    if (!isPicture(file)) return { text: await readText(file) };
    this.check("vision", "see pictures");
    try {
      return { picture: await readPicture(file) };
    } catch {
      throw new Error(`${file.name} is no picture that this browser can read.`);
    }
  }

  /** Throw an error if the model is known to lack a sense. */
  check(sense, what) {
    if (has(sense) === false)
      throw new Error(`${byId("model").value} cannot ${what}. Choose a model that can, or give it a projector with --mmproj.`);
  }

  /** Begin a recording, or end the one that runs. It is attached when it has ended. */
  async record() {
    if (this.endRecording) return this.endRecording();
    this.check("audio", "hear sound");
    const shown = byId("record");
    this.endRecording = () => {}; // the microphone is not open yet
    shown.classList.add("on");
    setText(shown, "Opening the microphone");
    addEventListener("beforeunload", ask);
    try {
      const { end, file } = await record();
      this.endRecording = end;
      setText(shown, "End the recording");
      this.add({ name: "Recording", sound: await base64(await readSound(await file)) });
      this.field.focus();
    } finally {
      this.endRecording = null;
      shown.classList.remove("on");
      setText(shown, "Record");
      showSenses();
      removeEventListener("beforeunload", ask);
    }
  }
}

/** Let the browser ask whether to leave the page. */
const ask = (event) => event.preventDefault();
