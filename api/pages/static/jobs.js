// The list of jobs, kept fresh while it is looked at; searched and sorted as its reader types. The address keeps both.

import { everySecond, refresher } from "./live.js";
import { managing } from "./managing.js";
import { many } from "./many.js";
import "./menu.js";

const PAUSE_MS = 250;
const form = document.getElementById("find");
const refresh = refresher(() => location.href, 3000);
let timer = null;

function find() {
  const query = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
  history.replaceState(null, "", query.size ? `/?${query}` : "/");
  refresh(true);
}

form?.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(find, PAUSE_MS);
});
form?.addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(timer);
  find();
});
many(() => refresh(true));
managing({ renamed: () => refresh(true), deleted: () => refresh(true) });
everySecond(() => refresh());
