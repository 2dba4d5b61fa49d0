// The page of webhooks: adds, tries, switches and deletes them over REST, and shows what was delivered as it happens.

import { oneAtATime } from "./asking.js";
import { everySecond, refresher } from "./live.js";

const refresh = refresher(() => location.href, 3000);
const problem = document.getElementById("hook-problem");
const adding = document.getElementById("new-hook");
const form = adding.querySelector("form");
const addingProblem = document.getElementById("new-hook-problem");
const deleting = document.getElementById("delete-hook");
const secret = document.getElementById("hook-secret");
const change = oneAtATime("/v1/webhooks", () => refresh(true), problem);
let doomed = "";

async function add(event) {
  event.preventDefault();
  const given = new FormData(form);
  const queue = given.get("queue").trim();
  const body = { url: given.get("url").trim(), events: given.getAll("events"), queue: queue || null };
  if (!body.events.length) {
    addingProblem.textContent = "Choose at least one event.";
    return;
  }
  const made = await change("POST", "", body, addingProblem);
  if (!made) return;
  adding.close();
  document.getElementById("hook-secret-text").textContent = made.secret;
  secret.showModal();
}

async function remove() {
  deleting.close();
  await change("DELETE", `/${doomed}`);
}

function open() {
  form.reset();
  addingProblem.textContent = "";
  adding.showModal();
}

function confirm({ delete: id, url }) {
  doomed = id;
  document.getElementById("delete-hook-url").textContent = url;
  deleting.showModal();
}

form.addEventListener("submit", add);
secret.addEventListener("close", () => (document.getElementById("hook-secret-text").textContent = ""));
document.getElementById("new-hook-close").addEventListener("click", () => adding.close());
document.getElementById("delete-hook-confirm").addEventListener("click", remove);
document.addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (!button) return;
  const { ping, active, again, hook } = button.dataset;
  if (button.id === "add-hook") open();
  if (button.dataset.delete) confirm(button.dataset);
  if (ping) change("POST", `/${ping}/test`);
  if (active) change("PATCH", `/${hook}`, { active: active === "true" });
  if (again) change("POST", `/${hook}/deliveries/${again}/redeliver`);
});
everySecond(() => refresh());
