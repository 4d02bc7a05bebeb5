// Branches of conversations. Pure. A branch is a session whose id is that of its root, a tilde, and more.

import { same, textOf } from "./content.js";

export const rootOf = (id) => id.split("~")[0];

const random = () => crypto.getRandomValues(new Uint32Array(3)).join("-");
export const newRoot = () => `chat-${random()}`;
export const newBranch = (id) => `${rootOf(id)}~${random()}`;

/** Conversations, each with its branches; sessions and conversations are those that were used last first. */
export function conversations(sessions) {
  const found = new Map();
  for (const each of sessions) {
    const root = rootOf(each.session_id);
    if (!found.has(root)) found.set(root, []);
    found.get(root).push(each);
  }
  return [...found.values()];
}

/**
 * For each message the ids of the sessions that have another message in its place after the same beginning, oldest
 * first, with `current` in the place of the branch that is shown. Branches are {id, created_at, messages}.
 */
export function variants(branches, current) {
  const shown = branches.find(({ id }) => id === current);
  let alike = [...branches].sort((a, b) => a.created_at - b.created_at || (a.id < b.id ? -1 : 1));
  return shown.messages.map((message, i) => {
    const distinct = [];
    for (const each of alike) {
      if (each.messages[i] === undefined) continue;
      const at = distinct.findIndex((other) => same(other.messages[i], each.messages[i]));
      if (at < 0) distinct.push(each);
      else if (each === shown) distinct[at] = each;
    }
    alike = alike.filter((each) => same(each.messages[i], message));
    return distinct.map(({ id }) => id);
  });
}

/** What a request has to say so that its session goes on as wanted, and the messages that are then before its own. */
export function continuation(messages, dropped, system) {
  const kept = messages.slice(0, messages.length - dropped);
  const has = kept[0]?.role === "system" ? textOf(kept[0]) : "";
  if (has === system) return { kept, before: [], fields: { drop_messages: dropped } };
  const rest = has ? kept.slice(1) : kept;
  const before = [...(system ? [{ role: "system", content: system }] : []), ...rest];
  return { kept: [], before, fields: { history: "replace" } };
}
