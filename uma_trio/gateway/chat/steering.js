// Changes of an answer while it is written: text in it, a message of the user, its end. The daemon makes a change with the next token.

import { request } from "../dashboard/api.js";
import { byId } from "../dashboard/dom.js";

export class Steering {
  /** Args: the composer; `say`, for what the user should know; `onRefused`, for errors. */
  constructor({ composer, say, onRefused }) {
    Object.assign(this, { composer, say, id: null });
    const clicks = {
      insert: () => this.write((text) => ({ text: /^[\p{L}\p{N}]/u.test(text) ? ` ${text}` : text }), "Your text is in the answer"),
      interrupt: () => this.write((message) => ({ message }), "The model answers your message"),
      "end-sentence": () => this.change({ stop: "sentence" }, "The answer ends after this sentence"),
      "end-reasoning": () => this.change({ end_reasoning: true }, "The reasoning ends"),
      bound: () => this.bound(),
    };
    for (const [id, work] of Object.entries(clicks)) byId(id).addEventListener("click", () => onRefused(work));
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || !this.id) return;
      event.preventDefault();
      event.stopImmediatePropagation();
      onRefused(clicks.insert);
    });
  }

  /** The request `id` is to be answered. */
  begin(id) {
    this.id = id;
  }

  /** What the answer does now; before it does anything there is nothing to change. */
  show(state) {
    byId("steering").hidden = false;
    byId("end-reasoning").hidden = state !== "Reasoning";
  }

  end() {
    this.id = null;
    byId("steering").hidden = true;
  }

  async change(changes, done) {
    const { id } = this;
    await request(`v1/requests/${encodeURIComponent(id)}/steer`, { body: changes });
    if (this.id === id) this.say(done); // the answer has perhaps ended meanwhile
  }

  /** Change the answer by what is written below. */
  async write(changes, done) {
    const { text, files } = this.composer.draft;
    if (!text.trim()) {
      this.say("Write your text below first.");
      byId("prompt").focus();
      return;
    }
    await this.change(changes(text), done);
    this.composer.put({ text: "", files });
  }

  async bound() {
    const found = prompt("How many tokens may this answer have in all?");
    const limit = Number(found);
    if (!found) return;
    if (!Number.isInteger(limit) || limit < 1) this.say("The limit must be a whole number of tokens.");
    else await this.change({ max_tokens: limit }, `The answer has at most ${limit} tokens`);
  }
}
