// What a reader may do about a job: pause, resume, try again, cancel, give another priority, lift a worker's ban.

import { ask } from "./asking.js";

const DONE = { pause: "paused", "pause?after=round": "told to pause", resume: "resumed", retry: "retried" };

// `changed` is given the job as an action has left it; `refresh` has the page's parts fetched again.
export function actions(jobId, { changed, refresh }) {
  const problem = document.getElementById("action-problem");
  const dialog = document.getElementById("confirm");
  const cancelProblem = document.getElementById("confirm-problem");
  let asking = false;

  const post = (path) => ask("POST", `/v1/jobs/${jobId}/${path}`);

  async function change(verb) {
    if (asking) return;
    asking = true;
    problem.textContent = "";
    try {
      changed(await post(verb));
    } catch (error) {
      problem.textContent = `The job was not ${DONE[verb] ?? DONE[verb.split("?")[0]]}: ${error.message}`;
      refresh();
    } finally {
      asking = false;
    }
  }

  async function unban(worker) {
    problem.textContent = "";
    try {
      await post(`workers/${encodeURIComponent(worker)}/unban`);
    } catch (error) {
      problem.textContent = `The ban was not lifted: ${error.message}`;
    }
    refresh();
  }

  async function cancel() {
    cancelProblem.textContent = "";
    try {
      await post("cancel");
      dialog.close();
      refresh();
    } catch (error) {
      cancelProblem.textContent = `The job was not cancelled: ${error.message}`;
    }
  }

  async function prioritise(event) {
    event.preventDefault();
    problem.textContent = "";
    try {
      changed(await ask("PATCH", `/v1/jobs/${jobId}`, { priority: Number(event.target.elements.priority.value) }));
    } catch (error) {
      problem.textContent = `The priority was not changed: ${error.message}`;
    }
  }

  document.getElementById("priority")?.addEventListener("submit", prioritise);
  document.addEventListener("click", ({ target }) => {
    if (target.closest("#cancel")) dialog.showModal();
    if (target.closest("#confirm-cancel")) cancel();
    const verb = target.closest("[data-verb]")?.dataset.verb;
    if (verb) change(verb);
    const banned = target.closest("[data-unban]")?.dataset.unban;
    if (banned) unban(banned);
  });
}
