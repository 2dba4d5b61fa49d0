// What a reader may do about a job: pause, resume, try again, cancel, give another priority, lift a worker's ban.

import { ask } from "./asking.js";

const DONE = { pause: "paused", "pause?after=round": "told to pause", resume: "resumed", retry: "retried" };

// `changed` is given the job as an action has left it; `refresh` has the page's parts fetched again. Returns a function
// to be called with the job's priority whenever it may have been changed elsewhere.
export function actions(jobId, { changed, refresh }) {
  const problem = document.getElementById("action-problem");
  const dialog = document.getElementById("confirm");
  const cancelProblem = document.getElementById("confirm-problem");
  const priority = document.getElementById("priority"); // a job that has ended has none
  const prioritySet = document.getElementById("priority-set");
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
    problem.textContent = prioritySet.textContent = "";
    try {
      const job = await ask("PATCH", `/v1/jobs/${jobId}`, { priority: Number(priority.elements.priority.value) });
      priority.elements.priority.defaultValue = job.priority;
      changed(job);
      prioritySet.textContent = `Priority set to ${job.priority}`;
    } catch (error) {
      problem.textContent = `The priority was not changed: ${error.message}`;
    }
  }

  // The field's default is the priority that it last showed; a reader who is at it is left alone.
  function follow(now) {
    const field = priority?.elements.priority;
    if (!field || field === document.activeElement || field.defaultValue === String(now)) return;
    field.value = field.defaultValue = now;
    prioritySet.textContent = "";
  }

  priority?.addEventListener("submit", prioritise);
  priority?.addEventListener("input", () => { prioritySet.textContent = ""; });
  document.addEventListener("click", ({ target }) => {
    if (target.closest("#cancel")) dialog.showModal();
    if (target.closest("#confirm-cancel")) cancel();
    const verb = target.closest("[data-verb]")?.dataset.verb;
    if (verb) change(verb);
    const banned = target.closest("[data-unban]")?.dataset.unban;
    if (banned) unban(banned);
  });
  return follow;
}
