// A chat with the model, over POST /v1/generate: streamed, with tools, a schema, sampling, and reasoning folded away.

import { Refused, events } from "./api.js";
import { byId, count, el, ms, setText } from "./dom.js";

/** The JSON of a field; undefined if it is empty. */
function parsed(id, what) {
  const field = byId(id);
  const text = field.value.trim();
  field.classList.remove("invalid");
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    field.classList.add("invalid");
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
}

/** Tools as the daemon takes them; those of OpenAI's API have a level more. */
function tools() {
  const given = parsed("option-tools", "The list of tools");
  if (given === undefined) return [];
  return (Array.isArray(given) ? given : [given]).map((tool) => tool?.function ?? tool);
}

export class Chat {
  constructor({ onKeyNeeded }) {
    this.onKeyNeeded = onKeyNeeded;
    this.list = byId("messages");
    this.field = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("cancel").addEventListener("click", () => this.running?.abort());
    for (const button of document.querySelectorAll("[data-example]"))
      button.addEventListener("click", () => {
        const field = byId(button.dataset.example);
        field.value = field.placeholder;
        field.focus();
      });
    byId("chat-new").addEventListener("click", () => this.clear());
    this.clear();
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.list.replaceChildren(byId("chat-empty") ?? this.empty);
    this.empty = byId("chat-empty");
  }

  send() {
    const text = this.field.value.trim();
    if (!text || this.running) return;
    this.field.value = "";
    for (const card of this.list.querySelectorAll(".call textarea")) card.disabled = true;
    this.messages = this.messages.filter((message) => !message.tool_calls || this.isAnswered(message));
    this.messages.push({ role: "user", content: text });
    this.show("user", text);
    this.answer();
  }

  isAnswered(message) {
    const ids = new Set(this.messages.map((each) => each.tool_call_id));
    return message.tool_calls.every((call) => ids.has(call.id));
  }

  // -- one answer --

  body() {
    const system = byId("option-system").value.trim();
    const body = {
      messages: system ? [{ role: "system", content: system }, ...this.messages] : this.messages,
      separate_reasoning: true,
      stream: true,
    };
    const schema = parsed("option-schema", "The schema");
    if (schema !== undefined) body.constraint = { json_schema: schema };
    const offered = tools();
    if (offered.length) Object.assign(body, { tools: offered, tool_choice: byId("option-tool_choice").value });
    const session = byId("option-session_id").value.trim();
    const model = new URLSearchParams(location.search).get("model");
    if (model) body.model = model;
    if (session) Object.assign(body, { session_id: session, history: "replace" });
    for (const field of document.querySelectorAll("#numbers input")) if (field.value !== "") body[field.name] = Number(field.value);
    return body;
  }

  async answer() {
    let body;
    try {
      body = this.body();
    } catch (error) {
      this.show("error", error.message);
      this.takeBack();
      return;
    }
    const running = (this.running = new AbortController());
    this.setBusy(true);
    const shown = new Answer(this.show("assistant", ""), () => this.scroll());
    try {
      for await (const { name, data } of events("v1/generate", { body, signal: running.signal })) shown.take(name, data);
    } catch (error) {
      if (error.name === "AbortError") shown.after("cancelled");
      else {
        shown.fail(error.message);
        if (error instanceof Refused && error.status === 401) this.onKeyNeeded();
      }
    }
    shown.flush();
    if (this.running !== running) return; // another chat has begun
    this.running = null;
    this.setBusy(false);
    if (shown.message) {
      this.messages.push(shown.message);
      if (shown.message.tool_calls) shown.askForResults((results) => this.continueWith(results));
    } else this.takeBack();
  }

  /** A message that got no answer is for the user to send again. */
  takeBack() {
    if (this.messages.at(-1)?.role !== "user") return;
    const { content } = this.messages.pop();
    this.field.value ||= content;
  }

  continueWith(results) {
    if (this.running) return;
    this.messages.push(...results);
    this.answer();
  }

  // -- the page --

  setBusy(busy) {
    byId("send").hidden = busy;
    byId("cancel").hidden = !busy;
    if (busy && document.activeElement === byId("send")) byId("cancel").focus();
    if (!busy && (document.activeElement === byId("cancel") || document.activeElement === document.body)) this.field.focus();
  }

  show(role, text) {
    this.empty?.remove();
    const message = el("div", { class: `message ${role}` }, el("div", { class: "text" }, text));
    this.list.append(message);
    this.scroll(true);
    return message;
  }

  scroll(always = false) {
    const { scrollTop, scrollHeight, clientHeight } = this.list;
    if (always || scrollHeight - scrollTop - clientHeight < 120) this.list.scrollTop = scrollHeight;
  }
}

/** An answer while it arrives. Text is collected, and shown once a frame. */
class Answer {
  constructor(element, onGrown) {
    this.element = element;
    this.onGrown = onGrown;
    this.text = element.querySelector(".text");
    this.content = "";
    this.reasoning = "";
    this.waiting = { text: "", reasoning: "" };
    this.cards = [];
    this.message = null;
  }

  take(name, data) {
    switch (name) {
      case "token":
        this.content += data.text;
        this.waiting.text += data.text;
        break;
      case "reasoning":
        this.reasoning += data.text;
        this.waiting.reasoning += data.text;
        break;
      case "tool_call":
        this.takeCall(data);
        break;
      case "warnings":
        this.element.append(el("p", { class: "after" }, data.warnings.join("; ")));
        break;
      case "error":
        this.fail(`${data.code}: ${data.message}`);
        break;
      case "eos":
        this.end(data);
        break;
    }
    this.frame ??= requestAnimationFrame(() => this.flush());
  }

  flush() {
    this.frame = null;
    const { text, reasoning } = this.waiting;
    this.waiting = { text: "", reasoning: "" };
    if (text) this.text.append(text);
    if (reasoning) {
      if (!this.thoughts) {
        this.thoughts = el("div", { class: "text" });
        this.text.before(el("details", {}, el("summary", {}, "Reasoning"), this.thoughts));
      }
      this.thoughts.append(reasoning);
    }
    this.onGrown();
  }

  takeCall({ call, call_id, name, arguments: piece }) {
    if (!this.cards[call]) {
      const written = el("pre");
      const card = el("div", { class: "call" }, el("b", {}, name ?? ""), written);
      this.element.append(card);
      this.cards[call] = { card, written, id: call_id };
    }
    if (piece) this.cards[call].written.append(piece);
  }

  end(eos) {
    this.flush();
    const calls = eos.tool_calls;
    if (!calls) for (const { card } of this.cards.filter(Boolean)) card.remove(); // it has come again as text
    this.message = { role: "assistant", content: this.content || (calls ? null : "") };
    if (this.reasoning) this.message.reasoning = this.reasoning;
    if (calls) this.message.tool_calls = calls;
    const { usage, timings } = eos;
    const facts = [`${count(usage.completion_tokens)} tokens`];
    if (usage.cached_tokens) facts.push(`${count(usage.cached_tokens)} of ${count(usage.prompt_tokens)} prompt tokens cached`);
    if (timings.ttft_ms != null) facts.push(`TTFT ${ms(timings.ttft_ms)}`);
    if (timings.tokens_per_s != null) facts.push(`${count(timings.tokens_per_s)} tokens/s`);
    facts.push(eos.reason);
    this.after(facts.join(" · "));
  }

  after(text) {
    this.flush();
    this.element.append(el("p", { class: "after" }, text));
    if (!this.message && this.content) this.message = { role: "assistant", content: this.content };
  }

  fail(text) {
    this.element.append(el("p", { class: "error message" }, text));
  }

  /** Let the user type what each tool returns. */
  askForResults(onComplete) {
    const results = new Map();
    const { tool_calls: calls } = this.message;
    calls.forEach((call, i) => {
      const card = this.cards[i]?.card ?? el("div", { class: "call" }, el("b", {}, call.name), el("pre"));
      setText(card.querySelector("pre"), JSON.stringify(call.arguments, null, 2));
      const field = el("textarea", { rows: 1, spellcheck: "false" });
      const button = el("button", { type: "button" }, "Return");
      const done = () => {
        results.set(call.id, { role: "tool", tool_call_id: call.id, content: field.value });
        field.disabled = button.disabled = true;
        if (results.size === calls.length) onComplete(calls.map((each) => results.get(each.id)));
      };
      button.addEventListener("click", done);
      field.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || event.shiftKey) return;
        event.preventDefault();
        if (!field.disabled) done();
      });
      card.append(el("div", { class: "answer" }, el("label", {}, "What the tool returns", field), button));
      this.element.append(card);
      if (!i) field.focus();
    });
    this.element.append(...this.element.querySelectorAll(".after"));
    this.onGrown();
  }
}
