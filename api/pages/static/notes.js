// Editing a job's notes on its page.

import { ask } from "./asking.js";

// `edited` is given the job as the API returns it.
export function notes(jobId, edited) {
  const shown = document.getElementById("notes");
  const dialog = document.getElementById("edit-notes");
  const form = dialog.querySelector("form");
  const problem = document.getElementById("edit-notes-problem");

  async function save(event) {
    event.preventDefault();
    try {
      const job = await ask("PATCH", `/v1/jobs/${jobId}`, { notes: form.elements.notes.value });
      shown.textContent = job.spec.notes;
      dialog.close();
      edited(job);
    } catch (error) {
      problem.textContent = `The notes were not saved: ${error.message}`;
    }
  }

  form.addEventListener("submit", save);
  document.getElementById("edit-notes-close").addEventListener("click", () => dialog.close());
  document.addEventListener("click", ({ target }) => {
    if (!target.closest("#edit-notes-open")) return;
    problem.textContent = "";
    form.elements.notes.value = shown.textContent;
    dialog.showModal();
  });
}
