// A message as an element, with what can be done with it.

import { byId, copy, count, counted, el, setText } from "../dashboard/dom.js";
import { folded, folds } from "./answer.js";
import { mediaOf, textOf } from "./content.js";
import { parted } from "./files.js";
import { Growing } from "./markdown.js";
import { thumbnail } from "./pictures.js";
import { player } from "./sound.js";
import { resultForm } from "./tools.js";

const LONG = 1500; // characters of a question that are shown at once
const NAMES = { user: "You", assistant: "Answer", system: "System prompt", tool: "Result of a tool" };

const REASONS = { length: "cut off at the limit of tokens", cancelled: "stopped", stop: "" };

/** What an answer took, for people. */
function figures({ usage, timings, reason }, room) {
  const speed = timings.tokens_per_s == null ? "" : `${count(timings.tokens_per_s)} tokens/s`;
  const first = timings.ttft_ms == null ? "" : `first after ${(timings.ttft_ms / 1000).toFixed(1)} s`;
  const cached = `${count(usage.cached_tokens)} of ${count(usage.prompt_tokens)} prompt tokens cached`;
  const percent = Math.round((100 * (usage.prompt_tokens + usage.completion_tokens)) / room);
  const filled = percent > 0 ? `${percent} % of the context` : "";
  return [`${count(usage.completion_tokens)} tokens`, speed, first, cached, filled, REASONS[reason] ?? reason].filter(Boolean).join(" · ");
}

export function button(label, work, attributes = {}) {
  const made = el("button", { type: "button", class: "quiet", ...attributes }, label);
  made.addEventListener("click", work);
  return made;
}

/** A folded text that costs nothing until it is shown. */
function foldedText(title, text) {
  const made = folded(title, "");
  made.addEventListener("toggle", () => setText(made.lastChild, made.open ? text : ""));
  return made;
}

/** A question: its files folded, then its own text, folded if it is long. */
function question(content) {
  const { files, text } = parted(content);
  const shown = files.map((file) => foldedText(`${file.name} · ${counted(file.text.length, "character")}`, file.text));
  if (text.length <= LONG) return [...shown, text];
  return [...shown, `${text.slice(0, LONG / 4)} …`, foldedText(`Show all ${count(text.length)} characters`, text)];
}

/** An empty article of a role. Its text is its child of class `text`. */
export function emptyArticle(role) {
  return el("article", { class: role, "aria-label": NAMES[role] ?? role }, el("div", { class: "text" }));
}

/** The article of a message. `acts` has what its buttons do: `edit` (true if it may), `typed`, `again`, `resume`, each with the article, `results` of calls; and `room`, the tokens of the context. */
export function article(message, acts) {
  const made = emptyArticle(message.role);
  const shown = made.firstChild;
  const content = textOf(message);
  if (message.role === "system") shown.replaceWith(folded(NAMES.system, content));
  else if (message.role === "tool") shown.replaceWith(folded(`Result of ${message.name ?? "a tool"}`, content));
  else if (message.role === "assistant") new Growing(shown).show(content);
  else shown.append(...question(content).filter(Boolean));
  const media = mediaOf(message).map(({ type, data }, i) => (type === "image" ? thumbnail(data, `Picture ${i + 1}`) : player(data, "Sound")));
  if (media.length) made.prepend(el("div", { class: "media" }, ...media));
  if (message.reasoning) shown.before(folded("Reasoning", message.reasoning));
  for (const call of message.tool_calls ?? []) shown.after(folds(call));
  if (message.tool_calls?.length) made.append(resultForm(message.tool_calls, acts.results));
  finish(made, message, acts);
  return made;
}

/** Give a message that is complete its buttons. */
export function finish(made, message, acts) {
  const content = textOf(message);
  const actions = el("div", { class: "actions" });
  actions.append(button("Copy", (event) => copy(content, event.target)));
  if (message.role === "user" || (message.role === "assistant" && !message.tool_calls))
    actions.append(button("Edit", () => edit(made, content, acts)?.focus()));
  if (message.role === "assistant") {
    actions.append(button("Try again", () => acts.again(made)));
    if (!message.tool_calls && message.generation?.reason !== "stop") actions.append(button("Continue", () => acts.resume(made), { class: "quiet resume" }));
  }
  if (message.generation) actions.append(el("span", { class: "figures" }, figures(message.generation, acts.room())));
  made.querySelector(":scope > .actions")?.remove();
  made.append(actions);
}

/** Let the user write a message or an answer anew, in its place. `acts.typed` keeps what is written; null when it is given up. */
export function edit(made, content, acts) {
  if (made.querySelector("form")) return;
  const field = el("textarea", { "aria-label": "Edited message", rows: 3 });
  field.value = content;
  const label = made.classList.contains("assistant") ? "Go on from this" : "Send";
  const form = el("form", { class: "edit" }, field, el("button", { type: "submit" }, label));
  const hidden = [...made.children];
  const close = () => {
    form.remove();
    for (const each of hidden) each.hidden = false;
    made.querySelector(".actions button").focus();
  };
  const giveUp = () => {
    acts.typed(made, null);
    close();
  };
  form.append(button("Cancel", giveUp));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = field.value.trim();
    if (!text) giveUp();
    else if (acts.edit(made, text)) {
      close();
      byId("prompt").focus(); // as after other messages
    }
  });
  field.addEventListener("input", () => acts.typed(made, field.value));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      giveUp();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  for (const each of hidden) each.hidden = true;
  made.append(form);
  return field;
}

/** Show which of several messages in this place is shown; `go` gets the id of a session. */
export function showSwitcher(made, ids, current, go) {
  const before = made.querySelector(".switcher");
  const shown = [current, ...ids].join(" ");
  if (before?.dataset.shown === shown) return; // it has the focus, perhaps
  before?.remove();
  if (ids.length < 2) return;
  const at = ids.indexOf(current);
  const to = (label, name, i) => {
    const each = button(label, () => go(ids[i]), { "aria-label": name });
    each.disabled = ids[i] === undefined;
    return each;
  };
  const place = el("span", {}, `${at + 1} of ${ids.length}`);
  const label = { class: "switcher", "data-shown": shown, role: "group", "aria-label": "Branches" };
  made.querySelector(":scope > .actions")?.prepend(
    el("span", label, to("‹", "Previous branch", at - 1), place, to("›", "Next branch", at + 1)),
  );
}
