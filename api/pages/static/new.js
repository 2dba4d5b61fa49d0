// The form for a new job: shows the fields that its strategy and its model have, and what the server says of it as it is filled in.

import { replaceParts } from "./live.js";

const PAUSE_MS = 250;
const OF_MODELS = ["model", "augment"]; // which a recipe has itself
const form = document.getElementById("new");
let timer = null;
let asked = 0;

function showKinds() {
  for (const [owners, name] of [["kinds", "strategy.kind"], ["models", "model"]]) {
    const { value } = form.elements[name];
    for (const field of form.querySelectorAll(`[data-${owners}]`)) field.hidden = !field.dataset[owners].split(" ").includes(value);
  }
  const hasRecipe = Boolean(form.elements.recipe.value);
  for (const name of OF_MODELS) form.elements[name].closest(".field").hidden = hasRecipe;
  const { dataset } = form.elements; // of data sets, a recipe reads the user's own alone
  if (hasRecipe && !dataset.selectedOptions[0].closest("optgroup")) dataset.value = "";
  if (hasRecipe) for (const field of form.querySelectorAll("[data-models]")) field.hidden = true;
  form.elements.recipe_args.closest(".field").hidden = !hasRecipe;
  for (const name of ["codec.up", "codec.down"]) form.elements[name].closest(".field").hidden = form.elements.codec.value === "auto";
}

// Opens the panels that hide a field with which something is wrong.
function reveal() {
  for (const problem of form.querySelectorAll("details .field-error .problem:not(:empty)")) problem.closest("details").open = true;
}

async function check() {
  const turn = (asked += 1);
  try {
    const answer = await fetch("/new/check", { method: "POST", body: new URLSearchParams(new FormData(form)) });
    if (!answer.ok || turn !== asked) return;
    replaceParts(await answer.text());
    reveal();
  } catch {
    // Said when it is sent.
  }
}

form.addEventListener("input", () => {
  showKinds();
  clearTimeout(timer);
  timer = setTimeout(check, PAUSE_MS);
});
form.addEventListener("invalid", ({ target }) => { // the browser's own check; it can show only what is open
  if (target.closest("details")) target.closest("details").open = true;
}, true);
showKinds();
check(); // it may have been filled in before this ran, or by the browser
