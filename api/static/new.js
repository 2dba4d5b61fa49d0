// The form for a new job: shows the fields that its strategy has, and what the server says of it as it is filled in.

import { replaceParts } from "./live.js";

const PAUSE_MS = 250;
const form = document.getElementById("new");
let timer = null;
let asked = 0;

function showKinds() {
  const kind = form.elements["strategy.kind"].value;
  for (const field of form.querySelectorAll("[data-kinds]")) field.hidden = !field.dataset.kinds.split(" ").includes(kind);
  for (const name of ["codec.up", "codec.down"]) form.elements[name].closest(".field").hidden = form.elements.codec.value === "auto";
}

async function check() {
  const turn = (asked += 1);
  try {
    const answer = await fetch("/new/check", { method: "POST", body: new URLSearchParams(new FormData(form)) });
    if (answer.ok && turn === asked) replaceParts(await answer.text());
  } catch {
    // Said when it is sent.
  }
}

form.addEventListener("input", () => {
  showKinds();
  clearTimeout(timer);
  timer = setTimeout(check, PAUSE_MS);
});
showKinds();
check(); // it may have been filled in before this ran, or by the browser
