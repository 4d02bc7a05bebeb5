// An answer while it arrives: its events become text, folded reasoning and calls. Text is shown once a frame.

import { count, duration, el, setText } from "../dashboard/dom.js";
import { Growing } from "./markdown.js";

const SHOWN_WAIT_MS = 1500; // a shorter one without a queue is not worth a line

export const folded = (title, content) => el("details", {}, el("summary", {}, title), el("div", { class: "text" }, content));

export const folds = (call) => folded(`Calls ${call.name}`, JSON.stringify(call.arguments, null, 2));

export class Answer {
  /** Args: the place of its text, what it begins with, and functions: for what it does now, for its state, and after it was shown. */
  constructor(element, begun, { say, onState, onShown }) {
    Object.assign(this, { element, begun, say, onState, onShown, content: begun, reasoning: "", failure: "", calls: [] });
    this.hasBegun = false;
    this.generation = null; // of an answer that has ended
    this.growing = new Growing(element);
    this.frame = null;
    if (begun) this.flush();
  }

  take(name, data) {
    if (name === "forecast") this.wait(data);
    else if (name === "loading") this.say(`Loading ${data.model}: ${Math.round(100 * data.progress)} %`);
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
    if (this.state !== state) this.onState((this.state = state));
    this.waitEnds();
    this.hasBegun = true;
    work();
    this.frame ??= requestAnimationFrame(() => this.flush());
  }

  /** Say which place in the queue it has; and when it is predicted to begin, each second anew. */
  wait({ queue_position: place, start_ms: startMs }) {
    this.waitEnds();
    if (place > 0) this.say(place === 1 ? "Next in the queue" : `Place ${count(place)} in the queue`);
    else if (startMs < SHOWN_WAIT_MS) return;
    const begins = performance.now() + startMs;
    const note = el("p", { class: "wait" });
    const show = () => {
      const leftMs = begins - performance.now();
      setText(note, leftMs < 1000 ? "Begins any moment" : `Begins in about ${duration(leftMs / 1000)}`);
    };
    show();
    this.element.after(note);
    const timer = setInterval(show, 1000);
    this.waitEnds = () => {
      clearInterval(timer);
      note.remove();
      this.waitEnds = () => {};
    };
  }

  waitEnds() {}

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
