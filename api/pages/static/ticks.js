// The jobs that are ticked in the list, to be compared, cancelled or deleted: kept for as long as the tab is open, whichever of them it shows.

const [FEWEST, MOST] = [2, 6]; // as computeshare/comparing.py has it
const KEY = "ticked-jobs";
let ticked = new Set();

function load() {
  try {
    ticked = new Set(JSON.parse(sessionStorage.getItem(KEY) ?? "[]"));
  } catch {
    // Then they are those of this page.
  }
}

function keep() {
  try {
    sessionStorage.setItem(KEY, JSON.stringify([...ticked]));
  } catch {
    // Then for as long as this page is open.
  }
}

function words() {
  const count = ticked.size;
  if (!count) return "";
  if (count < FEWEST) return `${count} job selected, at least ${FEWEST} needed`;
  if (count > MOST) return `${count} jobs selected, at most ${MOST} can be compared`;
  return `${count} jobs selected`;
}

function show() {
  const button = document.getElementById("compare");
  if (!button) return; // no job is listed
  const boxes = [...document.querySelectorAll("#jobs .tick input")];
  for (const box of boxes) box.checked = ticked.has(box.value);
  const elsewhere = ticked.size - boxes.filter((box) => box.checked).length;
  button.disabled = ticked.size < FEWEST || ticked.size > MOST;
  document.getElementById("ticked").textContent = words() + (elsewhere ? `, ${elsewhere} not on this page` : "");
  document.getElementById("untick").hidden = !ticked.size;
  for (const name of ["cancel-ticked", "delete-ticked"]) document.getElementById(name)?.toggleAttribute("hidden", !ticked.size);
}

function change() {
  keep();
  show();
}

// The ids of all ticked jobs, also of those that another page of the list shows.
export const selected = () => [...ticked];

// Unticks a job that is gone.
export function forget(id) {
  if (ticked.delete(id)) change();
}

document.addEventListener("change", ({ target }) => {
  if (!target.matches("#jobs .tick input")) return;
  if (target.checked) ticked.add(target.value);
  else ticked.delete(target.value);
  change();
});
document.addEventListener("click", ({ target }) => {
  if (target.id !== "untick") return;
  ticked.clear();
  change();
  document.getElementById("content").focus({ preventScroll: true }); // the button is gone
});
document.addEventListener("formdata", ({ formData }) => {
  formData.delete("job");
  for (const id of ticked) formData.append("job", id);
});
document.addEventListener("replaced", show);
window.addEventListener("pageshow", () => { // also by going back, with the boxes as they were left here
  load();
  show();
});
load();
show();
