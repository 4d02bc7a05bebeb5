// The content of messages: texts and pictures. Pure.

/** The text of a message. */
export function textOf({ content }) {
  return typeof content === "string" ? content : (content ?? []).map((part) => part.text ?? "").join("");
}

/** The pictures of a message, as base64. */
export function picturesOf({ content }) {
  return Array.isArray(content) ? content.filter(({ type }) => type === "image").map(({ data }) => data) : [];
}

/** The content of a message with these pictures before its text. */
export function contentOf(text, pictures) {
  if (!pictures.length) return text;
  return [...pictures.map((data) => ({ type: "image", data })), ...(text ? [{ type: "text", text }] : [])];
}

/** Whether two messages, either of which may be undefined, say the same. */
export function same(a, b) {
  if (a === undefined || b === undefined || a.role !== b.role || textOf(a) !== textOf(b)) return false;
  if (JSON.stringify(a.tool_calls ?? null) !== JSON.stringify(b.tool_calls ?? null)) return false;
  const [seen, other] = [picturesOf(a), picturesOf(b)];
  return seen.length === other.length && seen.every((data, i) => data === other[i]);
}
