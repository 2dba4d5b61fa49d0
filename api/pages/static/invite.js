// Adding a machine: an invite is made, shown, counted down, and watched until the machine is there.

import { ask } from "./asking.js";
import { duration } from "./format.js";
import { now } from "./live.js";

const panel = document.getElementById("invite");
const LOOK_MS = 2000;
const WAITING = ["pending", "taken"];
const part = (name) => document.getElementById(`invite-${name}`);
let invite = null;
let timer = null;

async function make() {
  part("problem").textContent = "";
  try {
    const queue = panel.dataset.queue ?? part("queue").value.trim();
    const days = Number(part("days").value) || null;
    const person = part("person").value.trim() || null;
    invite = await ask("POST", "/v1/invites", { queue, days, person });
  } catch (error) {
    part("problem").textContent = `No invite was created: ${error.message}`;
    return;
  }
  clearInterval(timer);
  part("made").hidden = invite.blocked;
  part("obstacle").hidden = !invite.blocked;
  if (invite.blocked) explain();
  else offer();
}

// Why nobody could join by it, and what to do instead.
function explain() {
  part("note").textContent = invite.note;
  part("remedy").textContent = invite.remedy;
  part("instead").hidden = !invite.remedy;
}

function offer() {
  part("command").textContent = invite.command;
  [part("new").textContent, part("pipx").textContent] = invite.new_machine;
  part("qr").src = invite.qr;
  part("caution").textContent = invite.note;
  part("caution-line").hidden = !invite.note;
  show();
  timer = setInterval(look, LOOK_MS);
}

function show() {
  const left = (Date.parse(invite.expires_at) - now()) / 1000;
  const words = {
    pending: "Waiting for the machine",
    taken: `${invite.worker} has taken it up, and is not heard of yet`,
    joined: `${invite.worker} has joined`,
    ended: `The access of ${invite.worker} has ended`,
    expired: "The invite has expired",
  };
  const status = invite.status === "pending" && left <= 0 ? "expired" : invite.status;
  part("status").textContent = words[status];
  part("left").textContent = status === "pending" ? `${duration(left)} left` : "";
  return status;
}

async function look() {
  if (document.hidden) return;
  try {
    invite = { ...invite, ...(await ask("GET", `/v1/invites/${invite.id}`)) };
  } catch {
    // The server is away: the next turn asks again.
  }
  if (!WAITING.includes(show())) clearInterval(timer);
}

part("make").addEventListener("click", make);
document.addEventListener("click", ({ target }) => {
  if (target.closest("[href='#invite']")) panel.open = true; // a link leads to it, and would leave it closed
});
