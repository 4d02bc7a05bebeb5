// The chat page. Conversations are sessions of the daemon; branches are forks of a session.

import { Refused, apiKey, events, request, setApiKey } from "../dashboard/api.js";
import { byId, count, el, setText } from "../dashboard/dom.js";
import { Growing } from "./markdown.js";

const list = byId("list");
const field = byId("prompt");
const picker = byId("model");
let session = decodeURIComponent(location.hash.slice(1));
let messages = [];
let running = null;

const model = () => (picker.value ? { model: picker.value } : {});
const ask = async (action, body) => (await request(`v1/session/${action}`, { body: { ...body, ...model() } })).json();
const say = (text) => setText(byId("status"), text);
const fresh = () => `chat-${crypto.getRandomValues(new Uint32Array(3)).join("-")}`;
const draft = () => `uma-trio draft ${session}`;

/** Do something that may fail, and say why it has. */
async function trying(work) {
  try {
    return await work();
  } catch (error) {
    say(error instanceof Refused ? error.message : "The gateway cannot be reached. What you have typed is kept.");
    if (error.status === 401) askForKey();
    return undefined;
  }
}

function askForKey() {
  const key = prompt("API key, kept until this tab is closed", apiKey());
  if (key === null) return;
  setApiKey(key.trim());
  start();
}

// -- conversations --

async function showList() {
  const search = byId("search").value.trim();
  const query = new URLSearchParams({ ...model(), ...(search ? { contains: search } : {}) });
  const { sessions } = await (await request(`v1/sessions?${query}`)).json();
  list.replaceChildren(
    ...sessions.map((each) => {
      const button = el("button", { type: "button", "aria-current": String(each.session_id === session) }, each.title || each.session_id);
      button.addEventListener("click", () => open(each.session_id));
      return el("li", {}, button);
    }),
  );
}

async function open(id) {
  running?.abort();
  document.body.classList.remove("open");
  session = id;
  history.replaceState(null, "", id ? `#${encodeURIComponent(id)}` : location.pathname);
  messages = [];
  if (id) {
    try {
      const found = await ask("read", { session_id: id });
      messages = found.messages ?? [{ role: "assistant", content: found.text }];
    } catch (error) {
      if (error.code !== "E_SESSION_NOT_FOUND") throw error;
    }
  }
  const shown = byId("messages");
  shown.replaceChildren(...messages.map((message, i) => article(message, i)));
  shown.scrollTop = shown.scrollHeight;
  field.value = localStorage.getItem(draft()) ?? "";
  say("");
  await showList();
}

function text(content) {
  return typeof content === "string" ? content : (content ?? []).map((part) => part.text).join("");
}

function article(message, i) {
  const shown = el("div", { class: "text" });
  const made = el("article", { class: message.role, "aria-label": message.role }, shown);
  const content = text(message.content);
  if (message.role === "assistant") new Growing(shown).show(content);
  else shown.append(content);
  if (message.reasoning) shown.before(folded("Reasoning", message.reasoning));
  for (const call of message.tool_calls ?? []) shown.before(folded(`Calls ${call.name}`, JSON.stringify(call.arguments, null, 2)));
  made.append(actions(message, i, content));
  return made;
}

const folded = (title, content) => el("details", {}, el("summary", {}, title), el("div", { class: "text" }, content));

function actions(message, i, content) {
  const made = el("div", { class: "actions" });
  const add = (label, work) => {
    const button = el("button", { type: "button", class: "quiet" }, label);
    button.addEventListener("click", () => running || trying(work));
    made.append(button);
  };
  add("Copy", () => navigator.clipboard.writeText(content));
  if (message.role === "user") {
    add("Edit", async () => {
      const edited = prompt("Edit the message", content);
      if (edited) await branch(i, edited);
    });
    add("Try again", () => branch(i, content));
  }
  return made;
}

/** Ask again from a message on, in a fork: the conversation until now stays as it is. */
async function branch(i, content) {
  const dropped = messages.length - i;
  const id = fresh();
  await ask("fork", { session_id: session, new_id: id });
  await open(id);
  messages.splice(i);
  byId("messages").replaceChildren(...messages.map((message, at) => article(message, at)));
  await answer(content, dropped);
}

// -- one answer --

async function answer(content, dropped = 0) {
  session ||= fresh();
  history.replaceState(null, "", `#${encodeURIComponent(session)}`);
  const asked = { role: "user", content };
  const shown = el("div", { class: "text" });
  const made = el("article", { class: "assistant", "aria-label": "assistant" }, shown);
  const place = byId("messages");
  const question = article(asked, messages.length);
  place.append(question, made);
  const mine = (running = new AbortController());
  byId("send").hidden = true;
  byId("stop").hidden = false;
  say("Waiting for the answer");
  const growing = new Growing(shown);
  let said = "";
  let thought = null;
  let waiting = null;
  const flush = () => {
    waiting = null;
    const follows = place.scrollHeight - place.scrollTop - place.clientHeight < 120;
    growing.show(said);
    if (follows) place.scrollTop = place.scrollHeight;
  };
  place.scrollTop = place.scrollHeight;
  let failed = "";
  const body = { session_id: session, messages: [asked], drop_messages: dropped, separate_reasoning: true, progress: true, ...model() };
  try {
    for await (const { name, data } of events("v1/generate", { body, signal: mine.signal })) {
      if (name === "loading") say(`Loading ${data.model}: ${Math.round(100 * data.progress)} %`);
      else if (name === "progress") say(`Reading the conversation: ${count(data.prefilled_tokens)} of ${count(data.prompt_tokens)} tokens`);
      else if (name === "reasoning") {
        if (!thought) shown.before((thought = folded("Reasoning", "")));
        thought.lastChild.append(data.text);
      } else if (name === "token") {
        if (!said) say("Answering");
        said += data.text;
        waiting ??= requestAnimationFrame(flush);
      } else if (name === "error") failed = data.message;
      else if (name === "eos") {
        const { usage, timings } = data;
        const speed = timings.tokens_per_s == null ? "" : ` · ${count(timings.tokens_per_s)} tokens/s`;
        const cached = ` · ${count(usage.cached_tokens)} of ${count(usage.prompt_tokens)} prompt tokens cached`;
        made.append(el("div", { class: "actions" }, `${count(usage.completion_tokens)} tokens${speed}${cached} · ${data.reason}`));
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") failed = error instanceof Refused ? error.message : "The connection was lost.";
    if (error.status === 401) askForKey();
  }
  if (waiting) cancelAnimationFrame(waiting);
  if (said) flush();
  if (running !== mine) return; // another conversation was opened
  running = null;
  byId("send").hidden = false;
  byId("stop").hidden = true;
  say(failed || (mine.signal.aborted ? "Stopped" : "The answer is complete"));
  if (failed && !said) {
    question.remove();
    made.remove();
    field.value ||= content; // what got no answer is for the user to send again
    localStorage.setItem(draft(), field.value);
    return;
  }
  messages.push(asked, { role: "assistant", content: said });
  await trying(showList);
}

// -- the page --

function send() {
  const content = field.value.trim();
  if (!content || running) return;
  localStorage.removeItem(draft());
  field.value = "";
  answer(content);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
field.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
field.addEventListener("input", () => {
  try {
    localStorage.setItem(draft(), field.value);
  } catch {
    say("This text is too long to be kept when the page is closed.");
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => trying(() => open("")));
byId("key").addEventListener("click", askForKey);
byId("menu").addEventListener("click", () => {
  byId("menu").setAttribute("aria-expanded", String(document.body.classList.toggle("open")));
});
byId("search").addEventListener("input", () => trying(showList));
picker.addEventListener("change", () => trying(() => open("")));
byId("rename").addEventListener("click", () =>
  trying(async () => {
    const title = session && prompt("Title of this conversation", "");
    if (!title) return;
    await ask("rename", { session_id: session, title });
    await showList();
  }),
);
byId("delete").addEventListener("click", () =>
  trying(async () => {
    if (!session || !confirm("Delete this conversation?")) return;
    await ask("close", { session_id: session });
    await open("");
  }),
);
byId("export").addEventListener("click", () => {
  const url = URL.createObjectURL(new Blob([JSON.stringify({ messages }, null, 2)], { type: "application/json" }));
  el("a", { href: url, download: "conversation.json" }).click();
  URL.revokeObjectURL(url);
});
addEventListener("focus", () => trying(showList));

async function start() {
  await trying(async () => {
    const { data } = await (await request("v1/models")).json();
    const before = picker.value;
    picker.replaceChildren(...data.filter((each) => !each.capabilities || each.capabilities.includes("chat")).map((each) => el("option", { value: each.id }, each.id)));
    if (before) picker.value = before;
    await open(session);
  });
}

start();
