// Keeps a page that the server made up to date: its clocks, and the parts marked with data-part.

import { ago, until } from "./format.js";

const skew = Number(document.documentElement.dataset.now) - Date.now();
const printed = new Map();
let isPressed = false;
let held = null; // what came while the reader pressed something, which would not be clicked if it were replaced

// The server's time, in milliseconds.
export const now = () => Date.now() + skew;

function tellTime() {
  for (const time of document.querySelectorAll("time[data-ago], time[data-until]")) {
    const passed = (now() - Date.parse(time.dateTime)) / 1000;
    const text = "until" in time.dataset ? until(-passed) : ago(passed);
    if (time.textContent !== text) time.textContent = text;
  }
}

// Calls `tick`, and moves all clocks, once a second while anyone looks.
export function everySecond(tick = () => {}) {
  setInterval(() => {
    if (document.hidden) return;
    tellTime();
    tick();
  }, 1000);
}

// What a part says, whatever the time.
const print = (part) => part.innerHTML.replace(/(<time[^>]*>)[^<]*/g, "$1");

// Replaces one part, keeping what the reader has opened, scrolled to and focused.
function replacePart(place, fresh) {
  const focused = place.contains(document.activeElement) ? document.activeElement.id : null;
  const scrolled = [...place.querySelectorAll(".scroll[id]")].map(({ id, scrollTop }) => [id, scrollTop]);
  for (const { id, open } of place.querySelectorAll("details[id]")) fresh.querySelector(`#${id}`)?.toggleAttribute("open", open);
  const menu = place.querySelector(":popover-open")?.id;
  place.replaceChildren(...fresh.childNodes);
  if (menu) document.getElementById(menu)?.showPopover({ source: place.querySelector(`[popovertarget="${menu}"]`) });
  place.dispatchEvent(new Event("replaced", { bubbles: true }));
  for (const [id, top] of scrolled) document.getElementById(id)?.scrollTo(0, top);
  if (focused !== null) (document.getElementById(focused) ?? document.getElementById("content")).focus({ preventScroll: true });
}

const LOGGED_OUT = "You are logged out: open the link that computeshare login prints.";

// Says at the top of the page why it is not up to date; "" once it is.
function tellTrouble(text) {
  const place = document.getElementById("trouble");
  if (place.textContent !== text) place.textContent = text;
}

// The server has escaped every name in this document, and scripts in it do not run.
export function replaceParts(html) {
  if (isPressed) {
    held = html;
    return;
  }
  const fresh = new DOMParser().parseFromString(html, "text/html");
  for (const part of fresh.querySelectorAll("[data-part]")) {
    const place = document.getElementById(part.id);
    const text = print(part);
    if (!place || text === (printed.get(part.id) ?? print(place))) continue;
    printed.set(part.id, text);
    replacePart(place, part);
  }
  tellTime();
}

function letGo() {
  isPressed = false;
  if (held !== null) replaceParts(held);
  held = null;
}

addEventListener("pointerdown", () => { isPressed = true; }, true);
for (const sign of ["pointerup", "pointercancel", "pointermove", "blur"]) { // a menu may swallow the first two
  addEventListener(sign, ({ buttons }) => { if (isPressed && !buttons) setTimeout(letGo); }, true); // after the click
}

// Returns a function that asks for fresh parts. However often it is called, it fetches every `pause_ms` at most, and
// less often where the server takes long (it is busy training), unless the matter is urgent.
export function refresher(address, pause_ms) {
  let wanted = false;
  let soon = false;
  let busy = false;
  let timer = null;
  let due = 0;

  async function fetchParts() {
    const started = performance.now();
    [wanted, soon, busy, timer] = [false, false, true, null];
    try {
      const answer = await fetch(address(), { headers: { Accept: "text/html" } });
      if (answer.ok) replaceParts(await answer.text());
      tellTrouble(answer.ok ? "" : answer.status === 401 ? LOGGED_OUT : `The server answered ${answer.status}: this page is out of date.`);
    } catch {
      tellTrouble("The server does not answer: this page is out of date."); // whoever notices asks again
    }
    const ended = performance.now();
    due = ended + Math.min(20_000, Math.max(pause_ms, 40 * (ended - started)));
    busy = false;
    if (wanted) plan();
  }

  function plan() {
    if (busy || (timer !== null && !soon)) return;
    clearTimeout(timer);
    timer = setTimeout(fetchParts, soon ? 0 : Math.max(200, due - performance.now()));
  }

  return function refresh(urgent = false) {
    [wanted, soon] = [true, soon || urgent];
    plan();
  };
}
