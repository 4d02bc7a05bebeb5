// The timeline: a lane for each stream, a mark for each tick that gave it a token, and the duration of each tick below.
//
// Marks are painted once, when they arrive, onto a second canvas that is used as a ring: time t has the column
// t * pixelsPerSecond modulo its width. A frame copies the part of the ring that is shown now, which costs the same
// whether there are three marks or thirty thousand.

import { colours, count, counted, fitted, ms, setText, shortened } from "./dom.js";

const DELAY_S = 0.55; // the right edge is so far behind the daemon, so that what it shows has arrived
const KEPT_S = 30; // longer than the longest time shown
const FRAME_MS = 33;
const GUTTER = 92; // for the names of the lanes, in CSS pixels
const TICKS_HEIGHT = 76;
const LANES = [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];
const STEPS_MS = [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000];

const endOf = (tick) => tick.start_s + ((tick.decode_ms ?? 0) + (tick.sample_ms ?? 0)) / 1000;
const durationOf = (tick) => (tick.decode_ms ?? 0) + (tick.sample_ms ?? 0);
const promptTokensOf = (tick) => (tick.prefill_chunks ?? []).reduce((sum, [, n]) => sum + n, 0);

export class Timeline {
  constructor(canvas, readout, pauseButton) {
    this.canvas = canvas;
    this.readout = readout;
    this.pauseButton = pauseButton;
    this.ring = document.createElement("canvas");
    this.windowS = 6;
    this.lanes = LANES[0];
    this.scaleMs = STEPS_MS[0];
    this.reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
    new ResizeObserver(() => this.repaint()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    canvas.addEventListener("pointerleave", () => this.select(null));
    canvas.addEventListener("keydown", (event) => this.step(event));
    canvas.addEventListener("blur", () => this.select(null));
    pauseButton.addEventListener("click", () => this.pause(this.pausedAt == null));
    this.restart();
    requestAnimationFrame((now) => this.frame(now));
  }

  /** Forget everything: the clock of a new watch begins at 0. */
  restart() {
    this.ticks = [];
    this.later = []; // ticks that arrive during a pause
    this.names = new Map();
    this.clockOffset = Infinity; // of this page's clock to the daemon's, where the transport was fastest
    this.knownUntil = 0;
    this.selected = null;
    this.pausedAt = null;
    this.pauseButton.setAttribute("aria-pressed", "false");
    this.lastFrame = 0;
    this.repaint();
  }

  show(windowS) {
    this.windowS = windowS;
    this.repaint();
  }

  pause(paused) {
    this.pauseButton.setAttribute("aria-pressed", String(paused));
    this.pausedAt = paused ? this.now() : null;
    if (paused) return;
    this.ticks.push(...this.later);
    this.later = [];
    this.select(null);
    this.rescale();
    this.repaint();
  }

  /** Take the records of one event of the watch. */
  add(update) {
    const ticks = update.records.filter((record) => record.kind === "tick" && record.decode_calls !== 0);
    this.clockOffset = Math.min(this.clockOffset + 0.0005, performance.now() / 1000 - update.at_s);
    const kept = this.pausedAt == null ? this.ticks : this.later;
    kept.push(...ticks);
    const first = kept.findIndex((tick) => endOf(tick) >= update.at_s - KEPT_S);
    if (first > 500 || first < 0) kept.splice(0, first < 0 ? kept.length : first);
    const before = this.knownUntil;
    this.knownUntil = update.at_s;
    if (this.pausedAt != null) return;
    this.rename(update);
    if (this.rescale()) {
      this.repaint();
      return;
    }
    this.clear(before, update.at_s);
    for (const tick of ticks) this.paint(tick);
    if (this.reducedMotion.matches) this.draw();
    if (this.selected == null && ticks.length) this.describe(ticks.at(-1));
  }

  /** A lane keeps the name of the last stream in it for as long as its marks are shown. */
  rename(update) {
    for (const [lane, held] of this.names) {
      held.runs = false;
      if (held.seenAt < update.at_s - this.windowS) this.names.delete(lane);
    }
    for (const { seq_id: lane, session_id: session, request_id: request } of update.sequences)
      if (request != null) this.names.set(lane, { name: session ?? request, seenAt: update.at_s, runs: true });
  }

  now() {
    return Math.min(this.knownUntil, performance.now() / 1000 - this.clockOffset - DELAY_S);
  }

  /** Choose the number of lanes and the scale of the ticks. Both grow at once and shrink when nothing needs them. */
  rescale() {
    const from = this.now() - this.windowS;
    let most = 3;
    let longest = 4;
    for (const tick of this.ticks) {
      if (endOf(tick) < from) continue;
      for (const id of tick.decode_seq_ids ?? []) most = Math.max(most, id);
      for (const [id] of tick.prefill_chunks ?? []) most = Math.max(most, id);
      longest = Math.max(longest, durationOf(tick));
    }
    const lanes = LANES.find((n) => n > most) ?? most + 1;
    const scaleMs = STEPS_MS.find((n) => n >= longest) ?? longest;
    const changed = lanes > this.lanes || scaleMs > this.scaleMs || lanes < this.lanes / 2 || scaleMs < this.scaleMs / 4;
    if (changed) [this.lanes, this.scaleMs] = [lanes, scaleMs];
    return changed;
  }

  // -- painting onto the ring --

  repaint() {
    this.colours = colours();
    const { width, height, ratio } = fitted(this.canvas);
    this.ratio = ratio;
    this.shownWidth = Math.max(1, width - Math.round(GUTTER * ratio));
    this.pixelsPerSecond = this.shownWidth / this.windowS;
    this.ring.width = Math.ceil(this.shownWidth + this.pixelsPerSecond * 4);
    this.ring.height = Math.max(1, height);
    this.ink = this.ring.getContext("2d");
    this.lanesHeight = Math.max(1, height - TICKS_HEIGHT * ratio);
    const from = (this.pausedAt ?? this.now()) - this.windowS;
    for (const tick of this.ticks) if (endOf(tick) >= from) this.paint(tick);
    this.draw();
  }

  column(time) {
    return Math.round(time * this.pixelsPerSecond);
  }

  fill(from, to, y, height) {
    const width = this.ring.width;
    const x = ((from % width) + width) % width;
    const n = Math.min(to - from, width);
    this.ink.fillRect(x, y, Math.min(n, width - x), height);
    if (x + n > width) this.ink.fillRect(0, y, x + n - width, height);
  }

  clear(fromS, toS) {
    const width = this.ring.width;
    const from = this.column(fromS);
    const n = Math.min(this.column(toS) - from, width);
    const x = from % width;
    this.ink.clearRect(x, 0, Math.min(n, width - x), this.ring.height);
    if (x + n > width) this.ink.clearRect(0, 0, x + n - width, this.ring.height);
  }

  paint(tick) {
    const from = this.column(tick.start_s);
    let to = Math.max(from + 1, this.column(endOf(tick)));
    if (to - from > 3 * this.ratio) to -= Math.round(this.ratio);
    const lane = this.lanesHeight / this.lanes;
    const gap = Math.max(lane > 5 ? 1 : 0, Math.round(lane * 0.16));
    const height = Math.max(1, Math.round(lane) - gap);
    this.ink.fillStyle = this.colours.decode;
    for (const id of tick.decode_seq_ids ?? []) this.fill(from, to, Math.round(id * lane), height);
    this.ink.fillStyle = this.colours.prefill;
    for (const [id] of tick.prefill_chunks ?? []) this.fill(from, to, Math.round(id * lane), height);
    const bottom = this.ring.height;
    const full = Math.min(1, durationOf(tick) / this.scaleMs) * (TICKS_HEIGHT - 14) * this.ratio;
    const prompt = promptTokensOf(tick);
    const share = prompt / Math.max(1, prompt + (tick.decode_seq_ids ?? []).length);
    this.ink.fillStyle = this.colours.decode;
    this.fill(from, to, bottom - full * (1 - share), full * (1 - share));
    this.ink.fillStyle = this.colours.prefill;
    this.fill(from, to, bottom - full, full * share);
  }

  // -- what is shown --

  frame(now) {
    requestAnimationFrame((next) => this.frame(next));
    const isStill = !this.ticks.length || endOf(this.ticks.at(-1)) < this.now() - this.windowS - 1;
    const every = isStill ? 1000 : FRAME_MS;
    if (now - this.lastFrame < every - 4 || this.pausedAt != null || this.reducedMotion.matches) return;
    this.lastFrame = now;
    this.draw();
  }

  draw() {
    if (!this.ink) return;
    const { context, width, height, ratio } = fitted(this.canvas);
    const gutter = Math.round(GUTTER * ratio);
    const at = this.pausedAt ?? this.now();
    const first = this.column(at) - this.shownWidth;
    context.clearRect(0, 0, width, height);
    this.drawGrid(context, width, height, gutter, ratio);
    const ring = this.ring.width;
    const x = ((first % ring) + ring) % ring;
    const n = Math.min(this.shownWidth, ring - x);
    if (height && n > 0) {
      context.drawImage(this.ring, x, 0, n, height, gutter, 0, n, height);
      const rest = this.shownWidth - n;
      if (rest > 0) context.drawImage(this.ring, 0, 0, rest, height, gutter + n, 0, rest, height);
    }
    if (this.selected != null) {
      const left = gutter + this.column(this.selected.start_s) - first;
      const right = gutter + this.column(endOf(this.selected)) - first;
      context.strokeStyle = this.colours.ink;
      context.lineWidth = ratio;
      context.strokeRect(left - 0.5, 0.5, Math.max(2, right - left), height - 1);
    }
  }

  drawGrid(context, width, height, gutter, ratio) {
    const lane = this.lanesHeight / this.lanes;
    context.fillStyle = this.colours.field;
    const gap = Math.max(lane > 5 ? 1 : 0, Math.round(lane * 0.16));
    for (let i = 0; i < this.lanes; i++)
      context.fillRect(gutter, Math.round(i * lane), width - gutter, Math.max(1, Math.round(lane) - gap));
    context.font = `${11 * ratio}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil((13 * ratio) / lane));
    for (let i = 0; i < this.lanes; i++) {
      const held = this.names.get(i);
      if (i % every || !held) continue;
      context.globalAlpha = held.runs ? 1 : 0.5;
      context.fillStyle = this.colours.muted;
      context.fillText(shortened(held.name), 0, Math.max(6 * ratio, Math.round(i * lane + (lane - gap) / 2)), gutter - 6 * ratio);
    }
    context.globalAlpha = 1;
    context.fillStyle = this.colours.muted;
    const top = height - (TICKS_HEIGHT - 14) * ratio;
    context.fillText("tick", 0, height - 7 * ratio);
    context.fillText(`${count(this.scaleMs)} ms`, 0, top + 5 * ratio);
    context.fillStyle = this.colours.line;
    context.fillRect(gutter, top, width - gutter, ratio);
    context.fillRect(gutter, height - ratio, width - gutter, ratio);
  }

  // -- one tick --

  point(x) {
    const at = (this.pausedAt ?? this.now()) - this.windowS * (1 - (x - GUTTER) / (this.canvas.clientWidth - GUTTER));
    const slack = (2 * this.windowS) / this.canvas.clientWidth;
    this.select(this.ticks.findLast((tick) => tick.start_s - slack <= at && at <= endOf(tick) + slack) ?? null);
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.ticks.length) return;
    event.preventDefault();
    if (this.pausedAt == null) this.pause(true);
    const last = this.ticks.findLastIndex((tick) => tick.start_s <= this.pausedAt);
    const now = this.selected == null ? last + 1 : this.ticks.indexOf(this.selected);
    this.select(this.ticks[Math.max(0, Math.min(last, now + by))]);
  }

  select(tick) {
    if (tick === this.selected) return;
    this.selected = tick;
    if (tick != null) this.describe(tick);
    this.draw();
  }

  describe(tick) {
    const decodes = (tick.decode_seq_ids ?? []).length;
    const prompts = (tick.prefill_chunks ?? []).length;
    const parts = [`Tick of ${ms(durationOf(tick))}`];
    if (tick.predicted_ms != null) parts[0] += `, predicted ${ms(tick.predicted_ms)}`;
    if (decodes) parts.push(`${counted(decodes, "stream")} decoded`);
    if (prompts) parts.push(`${counted(promptTokensOf(tick), "token")} of ${counted(prompts, "prompt")} prefilled`);
    if (tick.draft_tokens) parts.push(`${tick.accepted_draft_tokens ?? 0} of ${tick.draft_tokens} draft tokens accepted`);
    if (tick.queue_depth) parts.push(`${count(tick.queue_depth)} waiting`);
    setText(this.readout, parts.join(" · "));
  }
}
