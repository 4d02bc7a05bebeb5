// The chat page. Conversations are sessions of the daemon; branches are forks of a session.

import { apiKey, request, setApiKey } from "../dashboard/api.js";
import { byId, el, setText } from "../dashboard/dom.js";
import { conversations, rootOf } from "./branches.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { showModels, showSenses } from "./models.js";
import { forget } from "./owner.js";
import { Settings } from "./settings.js";

const picker = byId("model");
const say = (text) => setText(byId("status"), text);
const model = () => (picker.value ? { model: picker.value } : {});
const tabs = new BroadcastChannel("uma-trio chat");
const RETRY_MS = 1000;
let sessions = [];

/** Do something that may fail, and say why it has. */
async function trying(work) {
  try {
    return await work();
  } catch (error) {
    if (error.name === "AbortError") return undefined;
    const isLost = error instanceof TypeError; // of fetch
    say(isLost ? "The gateway cannot be reached. What you have typed is kept." : error.message);
    if (isLost) again();
    if (error.status === 401) askForKey(apiKey() && error.message);
    return false;
  }
}

const settings = new Settings({
  system: () => open.system,
  onChange: (system) => {
    if (system !== undefined) open.system = system;
  },
});
const composer = new Composer(say, model);
const open = new Conversation({ composer, settings, say, model, onRefused: trying, onChange: () => changed(open.id) });

function changed(id) {
  tabs.postMessage(id);
  trying(showList);
}

// -- conversations --

/** The title of a conversation is that of its oldest branch, whichever is open. */
const titleOf = (branches) => branches.reduce((a, b) => (b.created_at < a.created_at ? b : a)).title;

async function showList() {
  const search = byId("search").value.trim();
  const query = new URLSearchParams({ ...model(), ...(search ? { contains: search } : {}) });
  ({ sessions } = await (await request(`v1/sessions?${query}`)).json());
  const shown = conversations(sessions).map((branches) => {
    const [{ session_id: id }] = branches;
    const title = titleOf(branches);
    const busy = branches.some((each) => each.busy) ? "… " : "";
    const current = String(rootOf(id) === rootOf(open.id));
    const button = el("button", { type: "button", "aria-current": current, "data-id": id }, busy + (title || "New chat"));
    button.addEventListener("click", () => go(id));
    return el("li", {}, button);
  });
  const { id: focused } = document.activeElement.closest("#list button")?.dataset ?? {};
  byId("list").replaceChildren(...(shown.length || !search ? shown : [el("li", { class: "muted" }, "Nothing found")]));
  showTitle();
  if (focused) byId("list").querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  await open.showBranches(sessions);
}

async function go(id, keepsStatus = false) {
  showMenu(false);
  await trying(async () => {
    await Promise.all([open.open(id, keepsStatus), showList()]);
    await open.showBranches(sessions);
  });
  if (!id) byId("prompt").focus();
}

const family = () => sessions.filter((each) => rootOf(each.session_id) === rootOf(open.id));

/** The tab has the title of the open conversation; a search that hides it leaves the title. */
function showTitle() {
  const branches = family();
  if (branches.length) document.title = `${titleOf(branches) || "New chat"} · Chat`;
  else if (!open.id) document.title = "Chat";
}

async function rename() {
  const title = open.id && prompt("Title of this conversation", family().length ? titleOf(family()) : "");
  if (!title) return;
  for (const { session_id } of family()) await open.post("rename", { session_id, title });
  changed(open.id);
}

async function remove() {
  if (!open.id || !confirm("Delete this conversation with all of its branches?")) return;
  const gone = family();
  await open.stop();
  for (const { session_id } of gone) await open.post("close", { session_id });
  tabs.postMessage(open.id);
  await go("");
}

function save() {
  const url = URL.createObjectURL(new Blob([JSON.stringify({ messages: open.messages }, null, 2)], { type: "application/json" }));
  el("a", { href: url, download: "conversation.json" }).click();
  URL.revokeObjectURL(url);
}

// -- the page --

/** Ask for the key, and say what is wrong with the one of before. */
function askForKey(wrong = "") {
  const dialog = byId("key-dialog");
  setText(byId("key-error"), wrong);
  if (dialog.open) return;
  byId("key-field").value = apiKey();
  dialog.returnValue = "";
  dialog.showModal();
}

/** Another key may be another person's: nothing of the one before stays. */
function use(key) {
  if (key === apiKey()) return start();
  const isFirst = !apiKey();
  if (!isFirst) {
    composer.keepDraft(); // so that it is not kept when the page goes
    forget();
  }
  setApiKey(key);
  if (!isFirst) return location.replace(location.pathname);
  composer.keepForOwner();
  location.reload();
}

function showMenu(shown) {
  document.body.classList.toggle("open", shown);
  byId("menu").setAttribute("aria-expanded", String(shown));
  if (shown) byId("search").focus();
}

for (const each of document.querySelectorAll("dialog .actions [type=button]"))
  each.addEventListener("click", () => each.closest("dialog").close(each.value));
byId("key-dialog").addEventListener("close", ({ target }) => {
  if (target.returnValue === "use") use(byId("key-field").value.trim());
  else if (target.returnValue === "forget") use("");
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  trying(() => open.send());
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  trying(() => open.send());
});
const CLICKS = { stop: () => open.stop(), new: () => go(""), key: askForKey, rename, export: save, delete: remove, record: () => composer.record() };
for (const [id, work] of Object.entries(CLICKS)) byId(id).addEventListener("click", () => trying(async () => work()));
byId("menu").addEventListener("click", () => showMenu(!document.body.classList.contains("open")));
document.body.addEventListener("click", ({ target }) => target === document.body && showMenu(false));
byId("search").addEventListener("input", () => trying(showList));
picker.addEventListener("change", () => {
  showSenses();
  go("");
});
picker.addEventListener("focus", () => trying(showModels));

addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const key = event.key.toLowerCase();
  if (key === "escape") document.body.classList.contains("open") ? showMenu(false) : open.stop();
  else if ((event.ctrlKey || event.metaKey) && key === "k") {
    event.preventDefault();
    showMenu(true);
    byId("search").focus();
  } else if (event.altKey && key === "n") {
    event.preventDefault();
    go("");
  }
});
addEventListener("focus", () => trying(async () => {
  await showList();
  if (!sessions.some((each) => each.session_id === open.id)) await open.check();
}));
addEventListener("offline", () => say("You are offline. What you have typed is kept."));
addEventListener("online", () => (open.reading ? say("You are online again.") : start()));
addEventListener("hashchange", () => go(idInAddress()));
tabs.addEventListener("message", ({ data: id }) => {
  if (id === open.id && !open.reading) go(id, true); // another tab has shown the end of the same answer
  else trying(showList);
});

function idInAddress() {
  const id = location.hash.slice(1);
  try {
    return decodeURIComponent(id);
  } catch {
    return id; // somebody wrote it by hand
  }
}

let timer;

/** Show what there is in a moment, unless an answer is read, which finds its connection again. */
function again() {
  clearTimeout(timer);
  timer = setTimeout(() => open.reading || start(), RETRY_MS);
}

/** Show what there is; again while the daemon starts. */
async function start() {
  clearTimeout(timer);
  try {
    await showModels();
  } catch (error) {
    await trying(() => Promise.reject(error));
    if (error.status >= 500) again();
    return;
  }
  await go(idInAddress());
}

open.moveTo(idInAddress());
composer.open(byId("prompt").value);
start();
