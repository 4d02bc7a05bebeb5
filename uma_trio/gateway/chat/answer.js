// An answer while it arrives: its events become text, folded reasoning and calls. Text is shown once a frame.

import { count, el } from "../dashboard/dom.js";
import { Growing } from "./markdown.js";

export const folded = (title, content) => el("details", {}, el("summary", {}, title), el("div", { class: "text" }, content));

export const folds = (call) => folded(`Calls ${call.name}`, JSON.stringify(call.arguments, null, 2));

export class Answer {
  /** Args: the place of its text, what it begins with, and two functions: for its state, and after it was shown. */
  constructor(element, begun, say, onShown) {
    Object.assign(this, { element, say, onShown, content: begun, reasoning: "", failure: "", calls: [] });
    this.hasBegun = false;
    this.generation = null; // of an answer that has ended
    this.growing = new Growing(element);
    this.frame = null;
    if (begun) this.flush();
  }

  take(name, data) {
    if (name === "loading") this.say(`Loading ${data.model}: ${Math.round(100 * data.progress)} %`);
    else if (name === "progress") this.say(`Reading the conversation: ${count(data.prefilled_tokens)} of ${count(data.prompt_tokens)} tokens`);
    else if (name === "warnings") this.say(data.warnings.join("; "));
    else if (name === "error") this.failure = data.message;
    else if (name === "token") this.add("Answering", () => (this.content += data.text));
    else if (name === "reasoning") this.add("Reasoning", () => this.reason(data.text));
    else if (name === "tool_call") this.add("Calling a tool", () => {});
    else if (name === "eos") {
      this.calls = data.tool_calls ?? [];
      this.generation = { reason: data.reason, usage: data.usage, timings: data.timings };
    }
  }

  add(state, work) {
    if (this.state !== state) this.say((this.state = state));
    this.hasBegun = true;
    work();
    this.frame ??= requestAnimationFrame(() => this.flush());
  }

  reason(text) {
    if (!this.thought) this.element.before((this.thought = folded("Reasoning", "")));
    this.reasoning += text;
    this.thought.lastChild.append(text);
  }

  /** Show what has arrived. */
  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.growing.show(this.content);
    this.onShown();
  }

  /** The message that it has become. */
  get message() {
    const made = { role: "assistant", content: this.content };
    if (this.reasoning) made.reasoning = this.reasoning;
    if (this.calls.length) made.tool_calls = this.calls;
    if (this.generation) made.generation = this.generation;
    return made;
  }
}
