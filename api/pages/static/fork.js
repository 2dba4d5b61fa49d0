// Starting a new job from one of the checkpoints.

import { ask } from "./asking.js";

const { job } = JSON.parse(document.getElementById("page-data").textContent);
const dialog = document.getElementById("fork");
const form = dialog.querySelector("form");
const problem = document.getElementById("fork-problem");
let version = 0;
let key = "";
let asking = false;

// Sent again as it is, a request makes no second job; changed, it is another one.
function renew() {
  key = `page-${Date.now()}-${Math.random()}`;
}

function open(chosen) {
  version = chosen;
  renew();
  problem.textContent = "";
  document.getElementById("fork-version").textContent = version.toLocaleString("en-US");
  form.reset();
  form.elements.name.value = `${job.title} from version ${version}`.slice(0, 100);
  dialog.showModal();
}

// A copy of an object with the field at a path, a list of names, set.
const changed = (object, [name, ...rest], value) => ({ ...object, [name]: rest.length ? changed(object[name], rest, value) : value });

// What differs from the parent, as the API wants it.
function changes() {
  const spec = { name: form.elements.name.value };
  for (const field of form.querySelectorAll("input[type=number]")) {
    if (field.value === field.defaultValue) continue;
    const [first, ...rest] = (field.dataset.field ?? field.name).split(".");
    spec[first] = rest.length ? changed(JSON.parse(field.dataset.part), rest, Number(field.value)) : Number(field.value);
  }
  return spec;
}

async function create(event) {
  event.preventDefault();
  if (asking) return;
  asking = true;
  try {
    const made = await ask("POST", `/v1/jobs/${job.id}/fork`, { version, spec: changes() }, { "Idempotency-Key": key });
    location.assign(`/jobs/${made.id}`);
  } catch (error) {
    problem.textContent = `No job was created: ${error.message}`;
  } finally {
    asking = false;
  }
}

form.addEventListener("submit", create);
form.addEventListener("input", renew);
document.getElementById("fork-close").addEventListener("click", () => dialog.close());
document.addEventListener("click", ({ target }) => {
  const button = target.closest("[data-fork]");
  if (button) open(Number(button.dataset.fork));
});
