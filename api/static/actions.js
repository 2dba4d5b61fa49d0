// What a reader may do about a job: pause, resume, try again, cancel, lift a worker's ban.

const DONE = { pause: "paused", "pause?after=round": "told to pause", resume: "resumed", retry: "retried" };

// `changed` is given the job as an action has left it; `refresh` has the page's parts fetched again.
export function actions(jobId, { changed, refresh }) {
  const problem = document.getElementById("action-problem");
  const dialog = document.getElementById("confirm");
  const cancelProblem = document.getElementById("confirm-problem");
  let asking = false;

  async function post(path) {
    const answer = await fetch(`/v1/jobs/${jobId}/${path}`, { method: "POST" });
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.detail);
    return body;
  }

  async function change(verb) {
    if (asking) return;
    asking = true;
    problem.textContent = "";
    try {
      changed(await post(verb));
    } catch (error) {
      problem.textContent = `The job was not ${DONE[verb]}: ${error.message}`;
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

  document.addEventListener("click", ({ target }) => {
    if (target.closest("#cancel")) dialog.showModal();
    if (target.closest("#confirm-cancel")) cancel();
    const verb = target.closest("[data-verb]")?.dataset.verb;
    if (verb) change(verb);
    const banned = target.closest("[data-unban]")?.dataset.unban;
    if (banned) unban(banned);
  });
}
