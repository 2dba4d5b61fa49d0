// The pages of data sets: remove them over REST.

import { ask } from "./asking.js";

const problem = document.getElementById("dataset-problem");
const removing = document.getElementById("remove-dataset");
let doomed = "";

async function remove() {
  removing.close();
  problem.textContent = "";
  try {
    await ask("DELETE", `/v1/datasets/${encodeURIComponent(doomed)}`);
    location.assign("/datasets");
  } catch (error) {
    problem.textContent = `The request failed: ${error.message}`;
  }
}

document.getElementById("remove-dataset-confirm").addEventListener("click", remove);
document.addEventListener("click", ({ target }) => {
  const name = target.closest("button")?.dataset.remove;
  if (!name) return;
  doomed = name;
  document.getElementById("remove-dataset-name").textContent = name;
  removing.showModal();
});
