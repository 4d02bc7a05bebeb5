// Tools that the model may call. The page runs none: whoever chats says what a call has given.

import { el } from "../dashboard/dom.js";

export const CURRENT_TIME = { name: "current_time", description: "The date and time where the user is" };

/** A value from JSON that the user has written. Throws an error that says what is wrong. */
export function written(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} not JSON: ${error.message}`);
  }
}

/** The tools in a JSON list; OpenAI's form works too. Throws an error that says what is wrong. */
export function toolsIn(text) {
  if (!text.trim()) return [];
  const found = written(text, "The tools are");
  const tools = Array.isArray(found) ? found.map((each) => each?.function ?? each) : [];
  if (!tools.length || tools.some((each) => typeof each?.name !== "string")) throw new Error("The tools must be a list of objects with name, description and parameters.");
  return tools;
}

/** A form for what calls have given; `send` gets the messages. The time is filled in. */
export function resultForm(calls, send) {
  const fields = calls.map(({ name }) => {
    const field = el("textarea", { rows: 2, required: "" });
    if (name === CURRENT_TIME.name) field.value = String(new Date());
    return field;
  });
  const labels = calls.map(({ name }, i) => el("label", {}, `Result of ${name}`, fields[i]));
  const form = el("form", { class: "results" }, ...labels, el("button", { type: "submit" }, "Send"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(calls.map(({ id, name }, i) => ({ role: "tool", tool_call_id: id, name, content: fields[i].value })));
  });
  return form;
}
