// After the first frame come the dialogs and the program, so that the frame need not wait for them.

function start() {
  const later = document.getElementById("later");
  later.replaceWith(later.content);
  import("./main.js");
}

if (document.hidden) start(); // it has no frames
else requestAnimationFrame(() => requestAnimationFrame(start)); // the next frame begins when the first is drawn
