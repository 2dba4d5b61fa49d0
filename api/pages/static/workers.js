// The workers' page: kept fresh while it is looked at; drains, undrains, removes and says whose machines are.

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
const whose = document.getElementById("person");
const whoseProblem = document.getElementById("person-problem");
const form = whose.querySelector("form");
let removing = null;
let assigning = null;

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

function askPerson({ worker, person, name }) {
  assigning = worker;
  whoseProblem.textContent = "";
  document.getElementById("person-machine").textContent = name;
  form.elements.person.value = person;
  whose.showModal();
  form.elements.person.select();
}

async function assign(event) {
  event.preventDefault();
  const person = form.elements.person.value.trim() || null;
  try {
    await ask("PATCH", `/v1/workers/${encodeURIComponent(assigning)}`, { person });
    whose.close();
    refresh(true);
  } catch (error) {
    whoseProblem.textContent = `The person was not saved: ${error.message}`;
  }
}

form.addEventListener("submit", assign);
document.getElementById("person-close").addEventListener("click", () => whose.close());
document.addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (button?.dataset.verb) change(button.dataset.worker, button.dataset.verb);
  if (button && "person" in button.dataset) askPerson(button.dataset);
  if (button?.dataset.remove) confirmRemoval(button.dataset);
  if (button?.id === "confirm-remove") remove();
});

everySecond(() => refresh());
