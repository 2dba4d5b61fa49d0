// Editing a job's notes and tags on its page.

import { ask } from "./asking.js";

// `edited` is given the job as the API returns it.
export function notes(jobId, edited) {
  const shown = document.getElementById("notes");
  const tags = document.getElementById("tags");
  const dialog = document.getElementById("edit-notes");
  const form = dialog.querySelector("form");
  const problem = document.getElementById("edit-notes-problem");

  async function save(event) {
    event.preventDefault();
    const words = form.elements.tags.value.split(/[\s,]+/).filter(Boolean);
    try {
      const job = await ask("PATCH", `/v1/jobs/${jobId}`, { notes: form.elements.notes.value, tags: words });
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
    form.elements.tags.value = [...tags.children].map((tag) => tag.textContent).join(", ");
    dialog.showModal();
  });
}
