// Renaming and deleting a job, on its page and in the list: a form and a question.

import { ask } from "./asking.js";
import { forget } from "./ticks.js";

// `renamed` is given the job as the API tells it, `deleted` its id.
export function managing({ renamed, deleted }) {
  const naming = document.getElementById("rename");
  const form = naming.querySelector("form");
  const question = document.getElementById("delete");
  const problems = ["rename", "delete"].map((name) => document.getElementById(`${name}-problem`));
  let jobId = null;

  function open(dialog, id) {
    jobId = id;
    for (const problem of problems) problem.textContent = "";
    dialog.showModal();
  }

  async function rename(event) {
    event.preventDefault();
    try {
      const job = await ask("PATCH", `/v1/jobs/${jobId}`, { name: form.elements.name.value });
      naming.close();
      // The server's part comes a moment later; whoever opens the form before is to find the new name.
      for (const button of document.querySelectorAll(`[data-rename="${job.id}"]`)) button.dataset.name = job.name;
      renamed(job);
    } catch (error) {
      problems[0].textContent = `The job was not renamed: ${error.message}`;
    }
  }

  async function remove() {
    try {
      await ask("DELETE", `/v1/jobs/${jobId}`);
      question.close();
      forget(jobId);
      deleted(jobId);
    } catch (error) {
      problems[1].textContent = `The job was not deleted: ${error.message}`;
    }
  }

  form.addEventListener("submit", rename);
  document.getElementById("rename-close").addEventListener("click", () => naming.close());
  document.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (button?.dataset.rename) {
      form.elements.name.value = button.dataset.name;
      open(naming, button.dataset.rename);
      form.elements.name.select();
    }
    if (button?.dataset.delete) {
      document.getElementById("delete-title").textContent = button.dataset.title;
      open(question, button.dataset.delete);
    }
    if (button?.id === "delete-confirm") remove();
  });
}
