// Settings: system prompt, sampling with presets, the form of answers, colours. They are kept in the browser.

import { byId, el } from "../dashboard/dom.js";
import { owned } from "./owner.js";
import { CURRENT_TIME, toolsIn, written } from "./tools.js";

const NAME = owned("settings");
const PRESETS = {
  "Model's defaults": {},
  Precise: { temperature: 0.2, top_p: 0.9 },
  Creative: { temperature: 1.1, min_p: 0.05, top_p: 1 },
};
const EMPTY = { system: "", sampling: {}, form: "text", schema: "", choices: "", tools: "", theme: "", presets: {} };
const PLAIN = ["form", "schema", "choices", "tools", "theme"]; // those whose field has just their value

function kept() {
  try {
    return { ...EMPTY, ...JSON.parse(localStorage.getItem(NAME)) };
  } catch {
    return EMPTY;
  }
}

/** The constraint of answers; undefined for free text. Throws an error that says what is wrong. */
function constraint({ form, schema, choices }) {
  if (form === "json") return { json_object: true };
  if (form === "choices") {
    const choice = choices.split("\n").map((each) => each.trim()).filter(Boolean);
    if (!choice.length) throw new Error("Write at least one choice, each in a line of its own.");
    return { choice };
  }
  if (form !== "schema") return undefined;
  const found = written(schema, "The JSON schema is");
  if (found === null || typeof found !== "object" || Array.isArray(found)) throw new Error("The JSON schema must be an object.");
  return { json_schema: found };
}

export class Settings {
  /**
   * Args: `system` says what the system prompt of the open conversation is; `onChange` gets another one, or undefined,
   * when the user has saved settings.
   */
  constructor({ system, onChange }) {
    this.system = system;
    this.onChange = onChange;
    this.now = kept();
    this.dialog = byId("settings");
    this.form = this.dialog.querySelector("form");
    this.numbers = [...document.querySelectorAll("#numbers input")];
    byId("settings-open").addEventListener("click", () => this.open());
    byId("preset").addEventListener("change", () => this.choose());
    byId("preset-save").addEventListener("click", () => this.savePreset());
    byId("preset-delete").addEventListener("click", () => this.deletePreset());
    byId("add-time").addEventListener("click", () => this.addTime());
    byId("form").addEventListener("change", () => this.showForm());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.save();
    });
    this.paint();
  }

  /** The fields of a request. */
  get fields() {
    const found = constraint(this.now);
    const tools = toolsIn(this.now.tools);
    return { ...this.now.sampling, ...(found ? { constraint: found } : {}), ...(tools.length ? { tools } : {}) };
  }

  open() {
    byId("system").value = this.shownSystem = this.system();
    for (const name of PLAIN) byId(name).value = this.now[name];
    this.showSampling(this.now.sampling);
    this.showPresets();
    this.showForm();
    byId("settings-error").textContent = "";
    this.dialog.showModal();
  }

  get presets() {
    return { ...PRESETS, ...this.now.presets };
  }

  get sampling() {
    return Object.fromEntries(this.numbers.filter(({ value }) => value !== "").map(({ name, value }) => [name, Number(value)]));
  }

  showSampling(sampling) {
    for (const field of this.numbers) field.value = sampling[field.name] ?? "";
  }

  showPresets(chosen = "") {
    const names = Object.keys(this.presets);
    byId("preset").replaceChildren(el("option", { value: "" }, "Choose"), ...names.map((name) => el("option", {}, name)));
    byId("preset").value = chosen;
    byId("preset-delete").disabled = !(chosen in this.now.presets);
  }

  choose() {
    const name = byId("preset").value;
    byId("preset-delete").disabled = !(name in this.now.presets);
    if (!name) return;
    const { system, ...sampling } = this.presets[name];
    this.showSampling(sampling);
    if (system !== undefined) byId("system").value = system;
  }

  savePreset() {
    const name = byId("preset-name").value.trim();
    if (!name) return byId("preset-name").focus();
    this.keep({ presets: { ...this.now.presets, [name]: { ...this.sampling, system: byId("system").value } } });
    byId("preset-name").value = "";
    this.showPresets(name);
  }

  deletePreset() {
    const { [byId("preset").value]: _, ...presets } = this.now.presets;
    this.keep({ presets });
    this.showPresets();
  }

  /** Offer the model a tool that tells the time. */
  addTime() {
    try {
      const others = toolsIn(byId("tools").value).filter(({ name }) => name !== CURRENT_TIME.name);
      byId("tools").value = JSON.stringify([...others, CURRENT_TIME], null, 2);
    } catch (error) {
      byId("settings-error").textContent = error.message;
    }
  }

  showForm() {
    byId("schema-label").hidden = byId("form").value !== "schema";
    byId("choices-label").hidden = byId("form").value !== "choices";
  }

  save() {
    const system = byId("system").value.trim();
    const isNew = system !== this.shownSystem;
    const wanted = { sampling: this.sampling, ...(isNew ? { system } : {}) };
    for (const name of PLAIN) wanted[name] = byId(name).value;
    try {
      constraint(wanted);
      toolsIn(wanted.tools);
    } catch (error) {
      byId("settings-error").textContent = error.message;
      return;
    }
    this.keep(wanted);
    this.dialog.close();
    this.onChange(isNew ? system : undefined);
  }

  keep(changes) {
    this.now = { ...this.now, ...changes };
    localStorage.setItem(NAME, JSON.stringify(this.now));
    this.paint();
  }

  paint() {
    document.documentElement.style.colorScheme = this.now.theme || "light dark";
    const { sampling, form, tools } = this.now;
    byId("settings-open").classList.toggle("changed", form !== "text" || tools !== "" || Object.keys(sampling).length > 0);
  }
}
