// How plots are looked at: by version or time, smoothed, on a log scale, and which part. The page's address keeps it.

const form = document.getElementById("view");
const reset = document.getElementById("reset-zoom");

// From two numbers, the first below the second, such as 120-340.
function zoomFrom(text) {
  const range = (text ?? "").split("-").map(Number);
  return range.length === 2 && range[0] >= 0 && range[0] < range[1] ? range : null;
}

function fromAddress() {
  const query = new URLSearchParams(location.search);
  const smooth = Number(query.get("smooth"));
  return {
    across: query.get("across") === "time" ? "time" : "version",
    log: query.get("log") === "1",
    smooth: smooth > 0 && smooth <= 0.99 ? smooth : 0,
    zoom: zoomFrom(query.get("zoom")),
  };
}

// What differs from the usual goes into the address; the rest of it stays.
function toAddress(view) {
  const query = new URLSearchParams(location.search);
  const set = {
    across: view.across === "time" && "time",
    log: view.log && "1",
    smooth: view.smooth && String(view.smooth),
    zoom: view.zoom?.join("-"),
  };
  for (const [name, value] of Object.entries(set)) value ? query.set(name, value) : query.delete(name);
  history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}${location.hash}`);
}

export const view = fromAddress();

// Has the plots show a range of whole versions or seconds, or (null) everything there is.
export function keepZoom(range) {
  view.zoom = range && [Math.max(0, Math.floor(range[0])), Math.ceil(range[1])];
  reset.hidden = !view.zoom;
  toAddress(view);
}

// Shows the view in its form, and calls `changed` whenever the reader chooses another.
export function choose(changed) {
  const { across, log, smooth } = form.elements;
  const amount = form.querySelector("output");
  const show = () => { amount.textContent = view.smooth ? view.smooth.toFixed(2) : "off"; };
  [across.value, log.checked, smooth.value] = [view.across, view.log, String(view.smooth)];
  show();
  reset.hidden = !view.zoom;
  reset.addEventListener("click", () => {
    keepZoom(null);
    form.elements.across.focus(); // the button is gone
    changed();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    if (across.value !== view.across) keepZoom(null); // the range was one of the other axis
    Object.assign(view, { across: across.value, log: log.checked, smooth: Number(smooth.value) });
    show();
    toAddress(view);
    changed();
  });
}
