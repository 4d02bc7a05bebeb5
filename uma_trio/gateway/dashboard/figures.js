// Figures, tables and the map of the KV cache, from each event of the watch.

import { byId, colours, count, counted, duration, el, fitted, ms, setRows, setText, shortened } from "./dom.js";

const RATE_OVER_S = 1.5;
const LINE_POINTS = 120;

/** The model that is shown, and what the others are doing. */
function models(metrics) {
  const shown = (metrics.model ?? "").replace(/\.gguf$/, "");
  const others = Object.entries(metrics.models ?? {}).filter(([name]) => name !== shown);
  return [shown, ...others.map(([name, model]) => `${name} ${model.state}`)].join(" · ");
}

/** Show the model, and links to the others that are loaded: the page and its chat then have another model. */
function showModels(node, metrics) {
  const text = models(metrics);
  if (node.title === text) return;
  node.title = text;
  const parts = text.split(" · ");
  const ready = Object.entries(metrics.models ?? {}).filter(([, model]) => model.state === "ready");
  node.replaceChildren(
    ...parts.flatMap((part, index) => {
      const found = index && ready.find(([name]) => part === `${name} ready`);
      const shown = found ? el("a", { href: `?model=${encodeURIComponent(found[0])}` }, found[0]) : part;
      return index ? [" · ", shown] : [shown];
    }),
  );
}

export class Figures {
  constructor() {
    this.line = [];
    this.restart();
    new ResizeObserver(() => this.last && this.drawMap(this.last)).observe(byId("kv-map"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.last && this.drawMap(this.last));
  }

  restart() {
    this.samples = [];
    this.mapShown = "";
  }

  show(update) {
    this.last = update;
    const { metrics } = update;
    this.showRates(update.at_s, metrics);
    showModels(byId("model"), metrics);
    setText(byId("facts"), `version ${metrics.version} · up ${duration(metrics.uptime_s)} · ${counted(metrics.connections, "connection")}`);
    setText(byId("running"), count(metrics.running));
    setText(byId("waiting"), `${count(metrics.queue_depth)} waiting`);
    setText(byId("ttft-p50"), ms(metrics.ttft_p50_ms));
    setText(byId("ttft-p95"), `p95 ${ms(metrics.ttft_p95_ms)}`);
    setText(byId("itl-p50"), ms(metrics.inter_token_p50_ms));
    setText(byId("itl-rest"), `p95 ${ms(metrics.inter_token_p95_ms)}, p99 ${ms(metrics.inter_token_p99_ms)}`);
    this.showCache(update);
    this.showSessions(update);
    this.showHealth(update);
  }

  // -- rates --

  showRates(at, metrics) {
    this.samples.push([at, metrics.tokens_total, metrics.prompt_tokens_total]);
    while (this.samples.length > 2 && at - this.samples[1][0] >= RATE_OVER_S) this.samples.shift();
    const [since, tokens, prompt] = this.samples[0];
    const seconds = Math.max(at - since, 1e-3);
    const isFirst = this.samples.length < 2;
    const rate = isFirst ? 0 : (metrics.tokens_total - tokens) / seconds;
    setText(byId("tokens-rate"), count(rate));
    setText(byId("prompt-rate"), `and ${count(isFirst ? 0 : (metrics.prompt_tokens_total - prompt) / seconds)} prompt tokens`);
    this.line.push(rate);
    if (this.line.length > LINE_POINTS) this.line.shift();
    const { context, width, height, ratio } = fitted(byId("rate-line"));
    const most = Math.max(...this.line, 1);
    context.clearRect(0, 0, width, height);
    context.beginPath();
    this.line.forEach((value, i) => {
      const x = width - (this.line.length - 1 - i) * (width / (LINE_POINTS - 1));
      context.lineTo(x, height - ratio - (value / most) * (height - 2 * ratio));
    });
    context.strokeStyle = colours().decode;
    context.lineWidth = 1.5 * ratio;
    context.stroke();
  }

  // -- KV cache --

  showCache(update) {
    const { kv } = update.metrics;
    const parts = [["used", kv.cells_used], ["reserved", kv.cells_reserved], ["cached", kv.cached_cells]];
    for (const [name, n] of parts) {
      setText(byId(`kv-${name}`), `${name} ${Math.round((100 * n) / kv.cells)} %`);
      byId(`kv-${name}`).title = `${count(n)} of ${count(kv.cells)} cells${name === "reserved" ? ", used ones included" : ""}`;
    }
    const rows = update.sequences.map((each) => [
      String(each.seq_id),
      [shortened(each.session_id ?? each.request_id ?? ""), "", each.session_id ?? each.request_id],
      each.state,
      [count(each.cells_used), "number"],
      [count(each.cells_reserved), "number"],
    ]);
    setRows(byId("sequences"), rows, "empty");
    this.drawMap(update);
  }

  drawMap(update) {
    const { context, width, height, ratio, changed } = fitted(byId("kv-map"));
    const shade = colours();
    const { cells } = update.metrics.kv;
    const parts = update.sequences.map((each) => [each.state === "cached", each.cells_used, each.cells_reserved]);
    const shown = JSON.stringify([parts, shade.decode]);
    if (shown === this.mapShown && !changed) return;
    this.mapShown = shown;
    context.fillStyle = shade.field;
    context.fillRect(0, 0, width, height);
    const rows = 3;
    const rowHeight = height / rows;
    const perRow = cells / rows;
    const fill = (from, n, colour) => {
      context.fillStyle = colour;
      for (let cell = from; cell < from + n; ) {
        const row = Math.min(rows - 1, Math.floor(cell / perRow));
        const end = Math.min(from + n, row === rows - 1 ? cells : (row + 1) * perRow);
        if (end <= cell) break;
        const x = ((cell - row * perRow) / perRow) * width;
        context.fillRect(x, row * rowHeight, Math.max(ratio, ((end - cell) / perRow) * width), rowHeight - 2 * ratio);
        cell = end;
      }
    };
    let at = 0;
    for (const [isCached, used, reserved] of parts) {
      fill(at, reserved, isCached ? shade.cached : shade.reserved);
      if (!isCached) fill(at, used, shade.decode);
      at += reserved;
      fill(at - Math.min(reserved, perRow / width), perRow / width, shade.panel);
    }
  }

  // -- sessions, health, errors --

  showSessions(update) {
    const { sessions } = update.metrics;
    setText(byId("session-facts"), `${count(sessions.stored)} stored · ${count(sessions.active)} active`);
    const rows = update.sessions.map((each) => [
      each.session_id,
      [count(each.turns), "number"],
      [count(each.tokens), "number"],
      each.busy ? "active" : each.durable ? "on disk" : "in memory",
    ]);
    setRows(byId("sessions"), rows, "none");
  }

  showHealth({ metrics, checks }) {
    const wrong = checks.filter((check) => !check.ok);
    const pill = byId("readiness");
    setText(pill, wrong.length ? "not ready" : "ready");
    pill.className = wrong.length ? "pill bad" : "pill good";
    pill.title = wrong.map((check) => `${check.name}: ${check.reason}`).join("\n");
    const restarts = (part) => (part == null ? "none" : counted(part.restarts_total ?? 0, "restart"));
    const tone = (part) => ((part?.restarts_total ?? 0) > 0 ? "bad" : "");
    const parts = ["engine", "gateway", "controllers"].map((name) => [name, [restarts(metrics[name]), tone(metrics[name])]]);
    setRows(byId("restarts"), parts);
    const several = new Set(checks.map((check) => check.model).filter(Boolean)).size > 1;
    const named = ({ name, model }) => (several && model ? `${name} (${model})` : name);
    setRows(byId("checks"), checks.map((check) => [named(check), [check.reason, check.ok ? "wrap" : "wrap bad"]]));
    const codes = new Map();
    for (const from of [metrics.requests_total, metrics.rejected_total])
      for (const [code, n] of Object.entries(from ?? {}))
        if (code.startsWith("E_")) codes.set(code, (codes.get(code) ?? 0) + n);
    const errors = [...codes].sort((a, b) => b[1] - a[1]).map(([code, n]) => [code, [count(n), "number"]]);
    setRows(byId("errors"), errors, "none");
  }
}
