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

  function show() {
    const what = `${action.verb} ${jobs(selected().length)}`;
    document.getElementById("many-heading").textContent = `${what}?`;
    confirm.textContent = what;
  }

  function open(chosen) {
    action = chosen;
    show();
    document.getElementById("many-text").textContent = action.text;
    problem.textContent = "";
    dialog.showModal();
  }

  // One after the other: those that are done are no longer selected; the others stay, with the reason.
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
    if (!failed.length) return dialog.close();
    show();
    problem.textContent = failed.join("; ");
  }

  confirm.addEventListener("click", act);
  document.addEventListener("click", ({ target }) => {
    const chosen = ACTIONS[target.id];
    if (chosen) open(chosen);
  });
}
