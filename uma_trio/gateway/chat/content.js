// The content of messages: texts, pictures and sound. Pure.

/** The text of a message. */
export function textOf({ content }) {
  return typeof content === "string" ? content : (content ?? []).map((part) => part.text ?? "").join("");
}

/** The parts of a message that are pictures or sound: {type, data}, with `data` as base64. */
export function mediaOf({ content }) {
  return Array.isArray(content) ? content.filter(({ type }) => type === "image" || type === "audio") : [];
}

/** The content of a message with pictures and sound before its text. */
export function contentOf(text, media) {
  return media.length ? [...media, ...(text ? [{ type: "text", text }] : [])] : text;
}

/** Whether two messages, either of which may be undefined, say the same. */
export function same(a, b) {
  if (a === undefined || b === undefined || a.role !== b.role || textOf(a) !== textOf(b)) return false;
  if (JSON.stringify(a.tool_calls ?? null) !== JSON.stringify(b.tool_calls ?? null)) return false;
  const [media, other] = [mediaOf(a), mediaOf(b)];
  return media.length === other.length && media.every(({ data }, i) => data === other[i].data);
}
