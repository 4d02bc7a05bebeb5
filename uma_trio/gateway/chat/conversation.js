// The open conversation: its messages, its branches, and the answer that is arriving.

import { Refused, events, request } from "../dashboard/api.js";
import { byId } from "../dashboard/dom.js";
import { Answer } from "./answer.js";
import { continuation, newBranch, newRoot, rootOf, variants } from "./branches.js";
import { contentOfDraft } from "./composer.js";
import { contentOf, mediaOf, same, textOf } from "./content.js";
import { article, edit, emptyArticle, finish, showSwitcher } from "./message.js";
import { owned } from "./owner.js";
import { Steering } from "./steering.js";

const MAX_BRANCHES = 20; // those that are compared, the last used
const RETRY_MS = 1000;
const BUSY_RETRIES = 8; // a session is busy for a moment after its answer was stopped
const NEAR_END_PX = 120;
const GOES_ON = { continue_final_message: true, constraint: undefined }; // the model goes on with the last message

const BEFORE_IT_BEGINS = ["request", "loading", "error"]; // events of an answer

const EDIT = owned("edit"); // which message is being edited in this tab, and how far

const keptEdit = () => JSON.parse(sessionStorage.getItem(EDIT)) ?? {};

function keepEdit(found) {
  if (found) sessionStorage.setItem(EDIT, JSON.stringify(found));
  else sessionStorage.removeItem(EDIT);
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

const GONE = "This conversation was deleted elsewhere.";
const OF_A_CONVERSATION = ["rename", "export", "delete"]; // buttons

const wasStopped = (answer) => answer.generation?.reason === "cancelled";

export class Conversation {
  /**
   * Args: the composer and the settings; `say`, for what the user should know; `model`, for the fields that name it;
   * `onChange`, when a session has changed; `onRefused`, for errors.
   */
  constructor(parts) {
    Object.assign(this, parts);
    this.place = byId("messages");
    this.steering = new Steering(parts);
    this.id = "";
    this.messages = [];
    this.system = "";
    this.reading = null;
    this.known = new Map(); // messages of other branches, by id and time of last use
    const at = (made) => [...this.place.children].indexOf(made);
    this.acts = {
      edit: (made, text) => this.edit(at(made), text),
      typed: (made, text) => keepEdit(text === null ? null : { id: this.id, i: at(made), text }),
      again: (made) => {
        const i = this.messages.findLastIndex(({ role }, j) => role === "user" && j < at(made));
        if (i >= 0) this.again(i);
      },
      resume: (made) => this.resume(at(made)),
      room: () => this.composer.room(),
      results: (results) => this.onRefused(() => this.answerCalls(results)),
    };
  }

  // -- opening --

  post(action, body) {
    return request(`v1/session/${action}`, { body: { ...body, ...this.model() } }).then((found) => found.json());
  }

  /** The session of an id with its messages; null if there is none yet. */
  async read(id) {
    try {
      const found = await this.post("read", { session_id: id });
      return { ...found, messages: found.messages ?? (found.text ? [{ role: "assistant", content: found.text }] : []) };
    } catch (error) {
      if (error.code === "E_SESSION_NOT_FOUND") return null;
      throw error;
    }
  }

  moveTo(id) {
    this.id = id;
    this.isGone = false;
    for (const name of OF_A_CONVERSATION) byId(name).disabled = !id;
    this.composer.moveTo(id);
    history.replaceState(null, "", id ? `#${encodeURIComponent(id)}` : location.pathname + location.search);
  }

  /** Show a session, and follow its answer if one is running. The answer of the session before goes on. */
  async open(id, keepsStatus = false) {
    this.reading?.abort();
    this.reading = null;
    this.setBusy(false);
    const moved = this.id !== id;
    this.moveTo(id);
    if (moved) this.composer.open();
    if (!id) this.show([]);
    const found = id ? await this.read(id) : null;
    if (this.id !== id || this.reading) return;
    if (!found && !moved && this.messages.length) return this.tellGone();
    if (found || moved) this.show(found?.messages ?? []);
    const [first] = this.messages;
    this.system = !first ? this.settings.now.system : first.role === "system" ? textOf(first) : "";
    this.toEnd();
    if (!keepsStatus) this.say("");
    if (id && (!found || found.session.busy)) await this.follow();
    this.settleSent();
  }

  /** The session that is shown was deleted: its messages stay in sight, and nothing more is asked in it. */
  tellGone() {
    this.isGone = true;
    this.say(GONE);
  }

  /** Look whether the session that is shown still exists. */
  async check() {
    const { id } = this;
    if (!id || this.isGone || this.reading || !this.messages.length) return;
    if (!(await this.read(id)) && this.id === id && !this.reading) this.tellGone();
  }

  /** What was sent and has not reached its session, as when the daemon was killed, goes back into the field. */
  settleSent(id = this.id) {
    const draft = this.composer.sent(id);
    if (!draft || this.reading) return;
    const message = { role: "user", content: contentOfDraft(draft) };
    const later = this.messages.slice(Math.max(0, draft.before - 1)); // the system prompt may be gone
    if (later.some((each) => same(each, message)) || this.composer.takeBack(draft)) this.composer.forgetSent(id);
  }

  /** Show messages, from one on whose place is `from`. */
  show(messages, from = 0) {
    const focused = this.place.querySelector(":focus");
    this.messages = messages;
    while (this.place.children.length > from) this.place.lastChild.remove();
    this.place.append(...messages.slice(from).map((message) => article(message, this.acts)));
    const { id, i, text } = keptEdit();
    if (id === this.id && messages[i]) edit(this.place.children[i], text, this.acts);
    if (focused && !focused.isConnected) byId(this.reading ? "stop" : "prompt").focus();
  }

  /** Scroll to the end, and again in some frames: the heights of messages are estimated until they are drawn. */
  toEnd(frames = 4) {
    this.place.scrollTop = this.place.scrollHeight;
    if (frames) requestAnimationFrame(() => this.toEnd(frames - 1));
  }

  /** Show where the open session differs from its branches. */
  async showBranches(sessions) {
    const { id, messages } = this;
    const family = sessions.filter((each) => rootOf(each.session_id) === rootOf(id)).slice(0, MAX_BRANCHES);
    if (!family.some((each) => each.session_id === id) || this.reading) return;
    this.sessions = sessions;
    const branches = await Promise.all(family.map((each) => this.branchOf(each)));
    if (this.id !== id || this.messages !== messages || this.reading) return;
    const found = variants(branches, id);
    [...this.place.children].forEach((made, i) => {
      const at = found[i].indexOf(id);
      // Buttons belong to the first message that differs: where the one before has fewer branches in common.
      showSwitcher(made, at < 0 ? [] : found[i], id, (to) => this.onRefused(() => this.switchTo(to)));
    });
  }

  async switchTo(id) {
    await this.open(id);
    await this.showBranches(this.sessions);
    this.place.querySelector(".switcher button:enabled")?.focus(); // the button that was pressed is gone
  }

  async branchOf({ session_id: id, used_at, created_at }) {
    if (id === this.id) return { id, created_at, messages: this.messages };
    const key = `${id} ${used_at}`;
    if (!this.known.has(key)) this.known.set(key, (await this.read(id))?.messages ?? []);
    return { id, created_at, messages: this.known.get(key) };
  }

  // -- asking --

  /** Send what the composer has. */
  async send() {
    const { content, draft } = this.composer;
    if (this.reading && content.length) return this.say("The answer is still running: end it first, or put your text into it.");
    if (!content.length || this.reading) return;
    if (this.isGone) return this.say(`${GONE} Begin a new chat to ask.`);
    const isNew = !this.id;
    this.composer.put({ text: "", files: [] });
    if (isNew) this.moveTo(newRoot());
    const { id } = this;
    this.composer.keepSent(id, { ...draft, before: this.messages.length });
    let ended = false;
    try {
      ended = await this.ask([{ role: "user", content }]);
    } finally {
      if (this.id === id) {
        if (isNew && !ended) this.moveTo("");
        this.settleSent(id);
      }
    }
  }

  /**
   * Ask a message anew, or let the model go on from an answer that was written anew; false while an answer runs. Without
   * an answer, what was written is there again.
   */
  edit(i, text) {
    if (this.reading) {
      this.say("The answer is still running: end it first.");
      return false;
    }
    keepEdit({ id: this.id, i, text });
    const { role } = this.messages[i];
    const message = { role, content: contentOf(text, mediaOf(this.messages[i])) };
    this.branch(i, message, role === "assistant" ? GOES_ON : {});
    return true;
  }

  /** Ask again from a message on, in a fork: the conversation until now stays as it is. */
  async branch(i, message, more = {}) {
    if (this.reading) return;
    const [from, messages] = [this.id, this.messages];
    const id = newBranch(from);
    await this.onRefused(async () => {
      await this.post("fork", { session_id: from, new_id: id });
      this.moveTo(id);
      if (await this.ask([message], messages.length - i, more)) return keepEdit(null);
      if (this.id !== id) return;
      await this.post("close", { session_id: id });
      this.moveTo(from);
      this.show(messages);
      this.place.querySelector(".edit textarea")?.focus();
    });
  }

  /** Ask a question again, and say if the answer is the same. */
  async again(i) {
    const { messages } = this;
    const [question, before] = messages.slice(i, i + 2);
    await this.branch(i, { role: "user", content: question.content });
    if (this.messages !== messages && this.messages.length === i + 2 && same(before, this.messages[i + 1]))
      this.say("The same answer: raise the temperature for another one.");
  }

  /** Tell the model what its calls have given. Without an answer, the results go back into their form. */
  async answerCalls(results) {
    if (this.reading || (await this.ask(results))) return;
    this.place.querySelectorAll("article:last-child .results textarea").forEach((field, i) => (field.value = results[i].content));
  }

  /** Let the model go on with its last answer. */
  async resume(i) {
    if (this.reading || i !== this.messages.length - 1) return;
    await this.ask([this.messages[i]], 1, GOES_ON);
  }

  /** Whether messages in place of the `dropped` last ones got an answer. Without one, all is as it was before. */
  async ask(messages, dropped = 0, more = {}) {
    const { before, fields } = continuation(this.messages, dropped, this.system);
    const asked = { messages: [...before, ...messages], ...fields, ...this.settings.fields, ...more };
    const body = { session_id: this.id, separate_reasoning: true, progress: true, forecast: true, ...asked, ...this.model() };
    for (let i = 0; ; i++) {
      const ended = await this.listen("v1/session/answer", body, asked);
      if (ended !== "busy") return ended;
      if (i === BUSY_RETRIES) {
        this.say("Another answer of this conversation is running; what you have typed is kept.");
        return false;
      }
      await pause(RETRY_MS / 4);
    }
  }

  /** Follow the answer that is running in the session, if there is one. */
  async follow() {
    await this.listen("v1/session/follow", { session_id: this.id }, null);
  }

  async stop() {
    if (!this.reading) return;
    try {
      await request("v1/session/stop", { body: { session_id: this.id } });
    } catch (error) {
      if (error.code !== "E_GATEWAY_NO_ANSWER") this.reading?.abort();
    }
  }

  // -- an answer that arrives --

  /** Show what is asked, and a place for its answer. */
  begin(asked) {
    const kept = asked.history === "replace" ? [] : this.messages.slice(0, this.messages.length - (asked.drop_messages ?? 0));
    const messages = [...kept, ...asked.messages];
    const begun = asked.continue_final_message ? textOf(messages.pop()) : "";
    this.show(messages, kept.length);
    const made = emptyArticle("assistant");
    made.setAttribute("aria-busy", "true");
    this.place.append(made);
    this.toEnd();
    let follows = true;
    this.place.onscroll = () => {
      follows = this.place.scrollHeight - this.place.scrollTop - this.place.clientHeight < NEAR_END_PX;
    };
    const answer = new Answer(made.firstChild, begun, {
      say: this.say,
      onState: (state) => {
        this.say(state);
        this.steering.show(state);
      },
      onShown: () => {
        if (follows) this.place.scrollTop = this.place.scrollHeight;
      },
    });
    answer.made = made;
    return answer;
  }

  /** True if there is an answer now, false if there is none, "busy" if the session was. */
  async listen(path, body, asked) {
    const before = this.messages;
    const mine = (this.reading = new AbortController());
    this.setBusy(true);
    this.say("Waiting for the answer");
    let answer = asked && this.begin(asked);
    let wasAccepted = false;
    let hasBegun = false;
    let refusal = null;
    try {
      for await (const { name, data } of events(path, { body, signal: mine.signal })) {
        if (this.reading !== mine) return true; // another session was opened; this answer goes on without the page
        wasAccepted = true;
        if (name === "request") {
          answer ??= this.begin(data);
          this.steering.begin(data.request_id);
        } else if (name === "inserted" && data.insertion.kind === "message") answer = this.interrupt(answer, data.insertion.text);
        else answer.take(name, data);
        if (!hasBegun && !BEFORE_IT_BEGINS.includes(name)) {
          hasBegun = true; // and so has the session
          this.onChange();
        }
      }
    } catch (error) {
      refusal = error;
    } finally {
      answer?.waitEnds();
    }
    if (this.reading !== mine) return true;
    this.reading = null;
    this.setBusy(false);
    if (answer) answer.flush();
    const wasCut = wasAccepted && !refusal && !answer?.failure && !answer?.generation; // the daemon was lost
    if (wasCut || (refusal && !(refusal instanceof Refused) && (wasAccepted || !asked))) return this.comeBack();
    if (!refusal && !answer?.failure && (answer?.hasBegun || (answer?.generation && !wasStopped(answer)))) {
      await this.end(answer);
      return true;
    }
    return this.giveUp(before, answer, refusal, asked);
  }

  /** A message of the user has interrupted the answer: what follows answers it. */
  interrupt(answer, content) {
    answer.waitEnds();
    answer.flush();
    answer.made.removeAttribute("aria-busy");
    finish(answer.made, answer.message, this.acts);
    this.messages.push(answer.message);
    return this.begin({ messages: [{ role: "user", content }] });
  }

  async end(answer) {
    const { message, made } = answer;
    this.messages.push(message);
    made.removeAttribute("aria-busy");
    if (answer.calls.length) made.replaceWith(article(message, this.acts));
    finish(this.place.lastChild, message, this.acts);
    this.say(wasStopped(answer) ? "Stopped" : "The answer is complete");
    if (answer.begun) await this.onRefused(() => this.showWhole(message));
    this.onChange();
  }

  /** Show what an answer that was continued took with its beginning, as the session has it. */
  async showWhole(message) {
    const found = (await this.read(this.id))?.messages.at(-1);
    if (!same(found, message) || message !== this.messages.at(-1)) return;
    message.generation = found.generation;
    finish(this.place.lastChild, message, this.acts);
  }

  /** The open session when no answer runs in it any more, or as it is after a while; null if there is none. */
  async settled() {
    const { id } = this;
    let found = null;
    for (let i = 0; i < BUSY_RETRIES; i++) {
      await pause(RETRY_MS / 4);
      found = await this.read(id);
      if ((found && !found.session.busy) || this.id !== id || this.reading) break;
    }
    return found;
  }

  async giveUp(before, answer, refusal, asked) {
    if (answer) this.show(before);
    if (refusal?.code === "E_SESSION_BUSY") return "busy";
    if (refusal?.code === "E_GATEWAY_NO_ANSWER") {
      const { id } = this;
      const found = await this.settled(); // it has ended since the session was read
      if (this.id !== id || this.reading) return true;
      this.show(found?.messages ?? []);
      this.say(found?.session.busy ? "Another program is asking in this conversation." : "");
    } else if (refusal instanceof Refused) await this.onRefused(() => Promise.reject(refusal));
    else if (refusal) this.say("The connection was lost.");
    else this.say(answer?.failure || "Stopped");
    return !asked;
  }

  /** The connection was lost in the middle of an answer, which goes on: find it again. */
  async comeBack() {
    const { id } = this;
    for (;;) {
      this.say("The connection was lost; trying again.");
      await pause(RETRY_MS);
      if (this.id !== id || this.reading) return true;
      try {
        await this.open(id);
        return true;
      } catch (error) {
        if (error instanceof Refused && error.status < 500) return this.onRefused(() => Promise.reject(error));
      }
    }
  }

  setBusy(busy) {
    const had = document.activeElement.matches("#send, #stop, #steering button");
    this.steering.end();
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    document.body.classList.toggle("busy", busy);
    if (had) byId(busy ? "stop" : "prompt").focus();
  }
}
