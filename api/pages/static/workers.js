// The workers' page: kept fresh while it is looked at; drains, undrains and removes.

import { ask } from "./asking.js";
import { everySecond, refresher } from "./live.js";

const refresh = refresher(() => location.href, 3000);
const problem = document.getElementById("action-problem");
const dialog = document.getElementById("confirm");
const dialogProblem = document.getElementById("confirm-problem");
const TEXTS = {
  yes: "The worker finishes its work unit and stops. To add it again, restart it.",
  "": "The worker is offline and will be removed from this list. To add it again, restart it.",
};
let removing = null;

async function change(worker, verb) {
  problem.textContent = "";
  try {
    await ask("POST", `/v1/workers/${encodeURIComponent(worker)}/${verb}`);
  } catch (error) {
    problem.textContent = `The worker was not ${verb}ed: ${error.message}`;
  }
  refresh(true);
}

function confirmRemoval({ remove, name, online }) {
  removing = remove;
  dialogProblem.textContent = "";
  document.getElementById("confirm-name").textContent = name;
  document.getElementById("confirm-text").textContent = TEXTS[online];
  dialog.showModal();
}

async function remove() {
  try {
    await ask("DELETE", `/v1/workers/${encodeURIComponent(removing)}`);
    dialog.close();
    refresh(true);
  } catch (error) {
    dialogProblem.textContent = `The worker was not removed: ${error.message}`;
  }
}

document.addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (button?.dataset.verb) change(button.dataset.worker, button.dataset.verb);
  if (button?.dataset.remove) confirmRemoval(button.dataset);
  if (button?.id === "confirm-remove") remove();
});

everySecond(() => refresh());
