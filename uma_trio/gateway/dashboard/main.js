// The dashboard: a watch of the daemon.

import { Refused, apiKey, events, request, setApiKey } from "./api.js";
import { byId, setText } from "./dom.js";
import { Figures } from "./figures.js";
import { Timeline } from "./timeline.js";

const INTERVAL_MS = 250;
const MODEL = new URLSearchParams(location.search).get("model"); // which one to show; the default model without it
const RETRY_MS = 1000;
const HIDDEN_MS = 30_000;

const timeline = new Timeline(byId("timeline"), byId("tick"), byId("pause"));
const figures = new Figures();
let wake = () => {};
let watching = new AbortController();

for (const button of document.querySelectorAll("[data-window]"))
  button.addEventListener("click", () => {
    for (const each of document.querySelectorAll("[data-window]")) each.setAttribute("aria-pressed", String(each === button));
    timeline.show(Number(button.dataset.window));
  });

function say(text, { withKey = false } = {}) {
  const notice = byId("notice");
  notice.hidden = !text;
  setText(notice, text);
  byId("key-open").hidden = !(withKey || apiKey() || document.body.dataset.keys);
  if (withKey) document.body.dataset.keys = "needed";
}

async function follow() {
  for (;;) {
    try {
      timeline.restart();
      figures.restart();
      watching = new AbortController();
      const model = MODEL ? `&model=${encodeURIComponent(MODEL)}` : "";
      for await (const { name, data } of events(`v1/watch?interval_ms=${INTERVAL_MS}${model}`, { signal: watching.signal })) {
        if (name === "error") throw new Error(data.message);
        if (name !== "watch") continue;
        say("");
        timeline.add(data);
        figures.show(data);
      }
      lost("The daemon has stopped.");
    } catch (error) {
      if (error.name === "AbortError") {
        if (document.hidden) await new Promise((resolve) => (wake = resolve));
        continue;
      }
      if (error instanceof Refused && [401, 403].includes(error.status)) {
        lost(whyNoAccess(error.status), true);
        setText(byId("readiness"), "no access");
        if (!apiKey()) askForKey();
        await new Promise((resolve) => (wake = resolve));
        continue;
      }
      lost(error instanceof Refused ? `No live view: ${error.message}.` : "The gateway cannot be reached; trying again.");
      await showReadiness();
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function whyNoAccess(status) {
  if (status === 403) return "The live view needs the key of an administrator, which yours is not. The chat page works with it.";
  if (apiKey()) return "Your key is not valid here, or was revoked. The live view needs the key of an administrator.";
  return "This gateway asks for an API key. The live view needs the key of an administrator; the chat page takes any key.";
}

function lost(text, withKey = false) {
  say(text, { withKey });
  const pill = byId("readiness");
  setText(pill, "no connection");
  pill.className = "pill bad";
}

/** A tab that nobody sees does not watch: the daemon has less to do. */
let leaving;
document.addEventListener("visibilitychange", () => {
  clearTimeout(leaving);
  if (document.hidden) leaving = setTimeout(() => watching.abort(), HIDDEN_MS);
  else wake();
});

/** A gateway without a daemon says why in its readiness. */
async function showReadiness() {
  try {
    await request("readyz");
  } catch (error) {
    if (error instanceof Refused) setText(byId("readiness"), "not ready");
  }
}

const dialog = byId("key-dialog");
function askForKey() {
  byId("key-field").value = apiKey();
  if (!dialog.open) dialog.showModal();
}
byId("key-open").addEventListener("click", askForKey);
dialog.addEventListener("close", () => {
  if (dialog.returnValue === "use") setApiKey(byId("key-field").value.trim());
  else if (dialog.returnValue === "forget") setApiKey("");
  else return;
  wake();
});

byId("to-chat").href = MODEL ? `chat?model=${encodeURIComponent(MODEL)}` : "chat";
say("");
follow();
