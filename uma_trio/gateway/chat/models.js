// The picker of models, with their states. A model that is loading says how far it is.

import { request } from "../dashboard/api.js";
import { byId, el, setText } from "../dashboard/dom.js";

const WHILE_LOADING_MS = 1000;

const SENSES = ["vision", "audio"];
const UNKNOWN = "unknown"; // of a model that is not loaded
const STATES = { loaded: "", unloaded: "not loaded" };

function label({ id, status }) {
  const state = STATES[status?.value] ?? status?.value ?? "";
  const progress = status?.progress == null ? "" : ` ${Math.round(100 * status.progress)} %`;
  return state ? `${id} (${state}${progress})` : id;
}

/** Whether the chosen model has a sense; undefined if that is not known. */
export function has(sense) {
  const senses = byId("model").selectedOptions[0]?.dataset.senses ?? UNKNOWN;
  return senses === UNKNOWN ? undefined : senses.split(" ").includes(sense);
}

/** Show the button that records if the chosen model hears, and the browser may use the microphone; and while it records. */
export function showSenses() {
  const record = byId("record");
  record.hidden = !record.classList.contains("on") && (!has("audio") || !navigator.mediaDevices);
}

/** Show the models that can chat; again while one of them is loading. */
export async function showModels() {
  const picker = byId("model");
  const { data } = await (await request("v1/models")).json();
  const found = data.filter((each) => !each.capabilities?.length || each.capabilities.includes("chat"));
  const before = picker.value;
  const options = new Map([...picker.options].map((each) => [each.value, each]));
  const shown = found.map((each) => {
    const option = options.get(each.id) ?? el("option", { value: each.id });
    setText(option, label(each));
    option.dataset.senses = each.status?.value === "loaded" ? SENSES.filter((sense) => each.capabilities?.includes(sense)).join(" ") : UNKNOWN;
    option.dataset.context = each.context_length ?? "";
    return option;
  });
  if (shown.length !== picker.options.length || shown.some((each, i) => each !== picker.options[i])) picker.replaceChildren(...shown);
  const wanted = before || new URLSearchParams(location.search).get("model");
  if (found.some(({ id }) => id === wanted)) picker.value = wanted;
  showSenses();
  clearTimeout(showModels.timer);
  if (found.some(({ status }) => status?.value === "loading"))
    showModels.timer = setTimeout(() => showModels().catch(() => {}), WHILE_LOADING_MS);
}
