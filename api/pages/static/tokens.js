// The page of tokens: makes and revokes them over REST.

import { oneAtATime } from "./asking.js";
import { everySecond, refresher } from "./live.js";

const refresh = refresher(() => location.href, 3000);
const problem = document.getElementById("token-problem");
const adding = document.getElementById("new-token");
const form = adding.querySelector("form");
const addingProblem = document.getElementById("new-token-problem");
const made = document.getElementById("token-made");
const revoking = document.getElementById("revoke-token");
const change = oneAtATime("/v1/tokens", () => refresh(true), problem);
let doomed = "";

function tell(token, link, name = "") {
  document.getElementById("token-made-name").textContent = name;
  document.getElementById("token-text").textContent = token;
  document.getElementById("token-login").textContent = link;
}

async function add(event) {
  event.preventDefault();
  const given = new FormData(form);
  const body = { name: given.get("name").trim(), scopes: given.getAll("scopes"), days: Number(given.get("days")) || null };
  if (!body.scopes.length) {
    addingProblem.textContent = "Choose at least one scope.";
    return;
  }
  const found = await change("POST", "", body, addingProblem);
  if (!found) return;
  adding.close();
  tell(found.token, found.login_url, found.name);
  made.showModal();
}

function open() {
  form.reset();
  addingProblem.textContent = "";
  adding.showModal();
}

function confirm({ revoke, name }) {
  doomed = revoke;
  document.getElementById("revoke-token-name").textContent = name;
  revoking.showModal();
}

form.addEventListener("submit", add);
made.addEventListener("close", () => tell("", ""));
document.getElementById("new-token-close").addEventListener("click", () => adding.close());
document.getElementById("revoke-token-confirm").addEventListener("click", () => {
  revoking.close();
  change("DELETE", `/${doomed}`);
});
document.addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (button?.id === "add-token") open();
  if (button?.dataset.revoke) confirm(button.dataset);
});
everySecond(() => refresh());
