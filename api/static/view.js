// How plots are looked at: across versions or time, smoothed, on a logarithmic scale. The page's address keeps it.

const form = document.getElementById("view");

function fromAddress() {
  const query = new URLSearchParams(location.search);
  const smooth = Number(query.get("smooth"));
  return {
    across: query.get("across") === "time" ? "time" : "version",
    log: query.get("log") === "1",
    smooth: smooth > 0 && smooth <= 0.99 ? smooth : 0,
  };
}

// What differs from the usual goes into the address; the rest of it stays.
function toAddress(view) {
  const query = new URLSearchParams(location.search);
  const set = { across: view.across === "time" && "time", log: view.log && "1", smooth: view.smooth && String(view.smooth) };
  for (const [name, value] of Object.entries(set)) value ? query.set(name, value) : query.delete(name);
  history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}${location.hash}`);
}

export const view = fromAddress();

// Shows the view in its form, and calls `changed` whenever the reader chooses another.
export function choose(changed) {
  const { across, log, smooth } = form.elements;
  const amount = form.querySelector("output");
  const show = () => { amount.textContent = view.smooth ? view.smooth.toFixed(2) : "off"; };
  [across.value, log.checked, smooth.value] = [view.across, view.log, String(view.smooth)];
  show();
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    Object.assign(view, { across: across.value, log: log.checked, smooth: Number(smooth.value) });
    show();
    toAddress(view);
    changed();
  });
}
