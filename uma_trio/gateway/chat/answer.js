// An answer while it arrives: its events become text, folded reasoning, calls and figures. Text is shown once a frame.

import { count, el } from "../dashboard/dom.js";
import { Growing } from "./markdown.js";

export const folded = (title, content) => el("details", {}, el("summary", {}, title), el("div", { class: "text" }, content));

export const folds = (call) => folded(`Calls ${call.name}`, JSON.stringify(call.arguments, null, 2));

const REASONS = { length: "cut off at the limit of tokens", cancelled: "stopped", stop: "" };

/** What an answer took, for people. */
export function figures({ usage, timings, reason }) {
  const speed = timings.tokens_per_s == null ? "" : `${count(timings.tokens_per_s)} tokens/s`;
  const first = timings.ttft_ms == null ? "" : `first after ${(timings.ttft_ms / 1000).toFixed(1)} s`;
  const cached = `${count(usage.cached_tokens)} of ${count(usage.prompt_tokens)} prompt tokens cached`;
  return [`${count(usage.completion_tokens)} tokens`, speed, first, cached, REASONS[reason] ?? reason].filter(Boolean).join(" · ");
}

export class Answer {
  /** Args: the place of its text, what it begins with, and two functions: for its state, and after it was shown. */
  constructor(element, begun, say, onShown) {
    Object.assign(this, { element, say, onShown, content: begun, reasoning: "", figures: "", failure: "", calls: [] });
    this.hasBegun = false;
    this.hasEnded = false;
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
      this.hasEnded = true;
      this.calls = data.tool_calls ?? [];
      this.figures = figures(data);
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
    return made;
  }
}
