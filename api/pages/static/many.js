// Cancelling or deleting all selected jobs of the list, after a question.

import { ask } from "./asking.js";
import { forget, selected } from "./ticks.js";

const ACTIONS = {
  "cancel-ticked": { verb: "Cancel", text: "Workers stop within a round. Checkpoints are kept, but the jobs cannot continue.", call: (id) => ask("POST", `/v1/jobs/${id}/cancel`) },
  "delete-ticked": { verb: "Delete", text: "The jobs, their checkpoints and their logs are removed for good.", call: (id) => ask("DELETE", `/v1/jobs/${id}`) },
};
const jobs = (count) => (count === 1 ? "1 job" : `${count} jobs`);

// `changed` is called once the jobs are cancelled or deleted, and after each failure.
export function many(changed) {
  const dialog = document.getElementById("many");
  const confirm = document.getElementById("many-confirm");
  const problem = document.getElementById("many-problem");
  let action = null;

  function open(chosen) {
    action = chosen;
    document.getElementById("many-heading").textContent = `${action.verb} ${jobs(selected().length)}?`;
    document.getElementById("many-text").textContent = action.text;
    confirm.textContent = `${action.verb} ${jobs(selected().length)}`;
    problem.textContent = "";
    dialog.showModal();
  }

  // One after the other: those that went well are not selected any more, and the others say why not.
  async function act() {
    confirm.disabled = true;
    const failed = [];
    for (const id of selected()) {
      try {
        await action.call(id);
        forget(id);
      } catch (error) {
        failed.push(error.message);
      }
    }
    confirm.disabled = false;
    changed();
    if (!failed.length) dialog.close();
    else problem.textContent = failed.join("; ");
  }

  confirm.addEventListener("click", act);
  document.addEventListener("click", ({ target }) => {
    const chosen = ACTIONS[target.id];
    if (chosen) open(chosen);
  });
}
