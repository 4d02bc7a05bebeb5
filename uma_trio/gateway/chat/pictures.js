// Pictures: files become small enough to be sent, and thumbnails. They are drawn, so the page loads nothing for them.

import { el } from "../dashboard/dom.js";

const SENT_AS_THEY_ARE = ["image/png", "image/jpeg", "image/gif", "image/bmp"]; // what the daemon reads
const MAX_BYTES = 512 * 1024; // a message has room for some
const MAX_SIDE = 2048; // pixels
const THUMBNAIL = 400;

/** Whether a file is a picture by its type. An SVG file is text. */
export const isPicture = ({ type }) => type.startsWith("image/") && type !== "image/svg+xml";

function draw(canvas, bitmap, maxSide) {
  const scale = Math.min(1, maxSide / Math.max(bitmap.width, bitmap.height));
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
}

export async function base64(blob) {
  const reader = new FileReader();
  await new Promise((resolve, reject) => {
    Object.assign(reader, { onload: resolve, onerror: () => reject(reader.error) });
    reader.readAsDataURL(blob);
  });
  return reader.result.slice(reader.result.indexOf(",") + 1);
}

/** A file as base64; anew as a smaller JPEG where it is large or of another format. Throws if it is no picture. */
export async function readPicture(file) {
  const bitmap = await createImageBitmap(file);
  let found = file;
  for (let side = MAX_SIDE; found.size > MAX_BYTES || !SENT_AS_THEY_ARE.includes(found.type); side /= 2) {
    const canvas = el("canvas");
    draw(canvas, bitmap, side);
    found = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.9));
  }
  bitmap.close();
  return base64(found);
}

/** An element that shows a picture. */
export function thumbnail(data, label) {
  const canvas = el("canvas", { class: "picture", role: "img", "aria-label": label });
  const shown = async () => {
    const bitmap = await createImageBitmap(new Blob([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))]));
    draw(canvas, bitmap, THUMBNAIL);
    bitmap.close();
  };
  shown().catch(() => canvas.replaceWith("A picture that this browser cannot show"));
  return canvas;
}
