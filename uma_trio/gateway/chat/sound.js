// Sound: files and recordings become WAV files of one channel, as models hear them. They are played without a URL.

import { el } from "../dashboard/dom.js";

const RATE = 16_000; // samples a second
const MAX_S = 240; // so that a session has room for it
const RECORDED_MS = 1000 * (MAX_S - 10); // a recording that is too long would be lost
const SLICE_MS = 100; // how often a recorder says what it has heard
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

const REFUSED = {
  NotAllowedError: "The microphone may not be used: allow it in the settings of this page in your browser.",
  NotFoundError: "No microphone was found.",
};

/**
 * Record what the microphone hears. Returns when it hears: what is said from then on is not lost. `end` ends the
 * recording; `file` is the whole of it, also if it ends by itself because it is long or the microphone is gone.
 */
export async function record() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true }).catch((error) => {
    throw new Error(REFUSED[error.name] ?? `The microphone cannot be used: ${error.message}`);
  });
  const recorder = new MediaRecorder(stream);
  const end = () => recorder.state === "inactive" || recorder.stop();
  const heard = [];
  let file;
  await new Promise((hears) => {
    const begun = performance.now();
    recorder.ondataavailable = ({ data }) => {
      heard.push(data);
      if (data.size) hears();
      if (performance.now() - begun > RECORDED_MS) end();
    };
    file = new Promise((resolve, reject) => {
      recorder.onstop = () => {
        for (const track of stream.getTracks()) track.stop();
        if (heard.some(({ size }) => size)) resolve(new File(heard, "Recording", { type: recorder.mimeType }));
        else reject(new Error("Nothing was recorded: the microphone gave no sound."));
        hears();
      };
    });
    recorder.start(SLICE_MS);
  });
  return { end, file };
}
