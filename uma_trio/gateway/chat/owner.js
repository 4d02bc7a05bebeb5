// Whose it is what the browser keeps: it is kept under a name that follows from the API key of this tab.

import { apiKey } from "../dashboard/api.js";

/** A number that follows from a key, as FNV-1a computes it. It is too short to find a key from it. */
function digest(key) {
  let found = 0x811c9dc5;
  for (const character of key) found = Math.imul(found ^ character.codePointAt(0), 0x01000193);
  return (found >>> 0).toString(16);
}

/** The name under which the browser keeps something for who has this key, or for all who have none. */
export const owned = (name) => ["uma-trio", ...(apiKey() ? [digest(apiKey())] : []), name].join(" ");

/** Forget all that is kept for who has this key, and all that this tab keeps, the key as well. */
export function forget() {
  for (const name of Object.keys(localStorage)) if (name.startsWith(owned(""))) localStorage.removeItem(name);
  sessionStorage.clear();
}
