// Read-only links to a job, on its page: creates, lists and revokes them.

import { ask } from "./asking.js";
import { duration } from "./format.js";

export function sharing(jobId) {
  const dialog = document.getElementById("share");
  const form = dialog.querySelector("form");
  const problem = document.getElementById("share-problem");
  const made = document.getElementById("share-made");
  const list = document.getElementById("share-links");
  const path = `/v1/jobs/${jobId}/links`;

  const days = (until) => (until ? `expires in ${duration((Date.parse(until) - Date.now()) / 1000)}` : "never expires");

  function row(link) {
    const item = document.createElement("li");
    const used = link.used_at ? `last used ${new Date(link.used_at).toLocaleString()}` : "not used yet";
    const about = document.createElement("span");
    about.textContent = `By ${link.created_by}: ${link.expired ? "expired" : days(link.expires_at)}, ${used}`;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "danger quiet small";
    button.textContent = "Revoke";
    button.addEventListener("click", () => tell(() => ask("DELETE", `${path}/${link.id}`)));
    item.append(about, button);
    return item;
  }

  // Does something about the links, and lists them as they are then.
  async function tell(change) {
    problem.textContent = "";
    try {
      await change();
      const { items } = await ask("GET", path);
      list.replaceChildren(...items.map(row));
    } catch (error) {
      problem.textContent = `The request failed: ${error.message}`;
    }
  }

  async function create() {
    const link = await ask("POST", path, { days: Number(form.elements.days.value) || null });
    document.getElementById("share-url").textContent = link.url;
    made.hidden = false;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    tell(create);
  });
  dialog.addEventListener("close", () => {
    document.getElementById("share-url").textContent = "";
    made.hidden = true;
  });
  document.getElementById("share-close").addEventListener("click", () => dialog.close());
  document.addEventListener("click", ({ target }) => {
    if (!target.closest("#share-open")) return;
    dialog.showModal();
    tell(async () => {});
  });
}
