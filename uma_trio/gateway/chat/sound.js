// Sound: files and recordings become WAV files of one channel, as models hear them. They are played without a URL.

import { el } from "../dashboard/dom.js";

const RATE = 16_000; // samples a second
const MAX_S = 240; // so that a session has room for it
const SAMPLE_BYTES = 2;
const HEADER_BYTES = 44;

/** Whether a file is sound by its type. */
export const isSound = ({ type }) => type.startsWith("audio/");

const decode = (bytes) => new OfflineAudioContext(1, 1, RATE).decodeAudioData(bytes);

/** A WAV file of samples between -1 and 1. */
function wav(samples) {
  const size = samples.length * SAMPLE_BYTES;
  const view = new DataView(new ArrayBuffer(HEADER_BYTES + size));
  const text = (at, word) => [...word].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, HEADER_BYTES - 8 + size, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format
  view.setUint16(20, 1, true); // not compressed
  view.setUint16(22, 1, true); // one channel
  view.setUint32(24, RATE, true);
  view.setUint32(28, RATE * SAMPLE_BYTES, true);
  view.setUint16(32, SAMPLE_BYTES, true);
  view.setUint16(34, 8 * SAMPLE_BYTES, true);
  text(36, "data");
  view.setUint32(40, size, true);
  samples.forEach((each, i) => view.setInt16(HEADER_BYTES + i * SAMPLE_BYTES, Math.max(-1, Math.min(1, each)) * 0x7fff, true));
  return view.buffer;
}

/** Sound as a WAV file. Throws an error if this browser cannot read it, or if it is too long. */
export async function readSound(file) {
  let decoded;
  try {
    decoded = await decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is no sound that this browser can read.`);
  }
  if (decoded.duration > MAX_S) throw new Error(`${file.name} is longer than ${MAX_S / 60} minutes.`);
  const channels = Array.from({ length: decoded.numberOfChannels }, (_, i) => decoded.getChannelData(i));
  return new Blob([wav(channels[0].map((_, i) => channels.reduce((sum, each) => sum + each[i], 0) / channels.length))]);
}

/** A button that plays a sound, given as base64, or stops it. */
export function player(data, label) {
  let context = null;
  const made = el("button", { type: "button", class: "quiet" }, `▶ ${label}`);
  const end = () => {
    made.textContent = `▶ ${label}`;
    context?.close();
    context = null;
  };
  made.addEventListener("click", async () => {
    if (context) return end();
    made.textContent = `■ ${label}`;
    context = new AudioContext();
    const source = context.createBufferSource();
    source.connect(context.destination);
    source.onended = end;
    try {
      source.buffer = await decode(Uint8Array.from(atob(data), (c) => c.charCodeAt(0)).buffer);
      source.start();
    } catch {
      made.replaceWith("A sound that this browser cannot play");
    }
  });
  return made;
}

/** Record what the microphone hears, until the function that is returned is called; that gives a file. */
export async function record() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const recorder = new MediaRecorder(stream);
  const heard = [];
  recorder.ondataavailable = ({ data }) => heard.push(data);
  recorder.start();
  return () =>
    new Promise((resolve) => {
      recorder.onstop = () => {
        for (const track of stream.getTracks()) track.stop();
        resolve(new File(heard, "Recording", { type: recorder.mimeType }));
      };
      recorder.stop();
    });
}
