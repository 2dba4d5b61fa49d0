// Saving a plot as a picture, and showing it on the whole screen.

const MARGIN = 12;
const TITLE = 28;
const style = () => getComputedStyle(document.documentElement);

// The plot's canvas below its heading and its lines' names, on the panel's colour.
function drawn(panel, heading) {
  const canvas = panel.querySelector("canvas");
  const scale = canvas.width / canvas.clientWidth;
  const picture = document.createElement("canvas");
  picture.width = canvas.width + 2 * MARGIN * scale;
  picture.height = canvas.height + (TITLE + 2 * MARGIN) * scale;
  const paint = picture.getContext("2d");
  paint.fillStyle = style().getPropertyValue("--panel");
  paint.fillRect(0, 0, picture.width, picture.height);
  paint.scale(scale, scale);
  paint.textBaseline = "middle";
  paint.font = "600 14px system-ui, sans-serif";
  paint.fillStyle = style().getPropertyValue("--text");
  paint.fillText(heading, MARGIN, MARGIN + TITLE / 2);
  let place = MARGIN + paint.measureText(heading).width + 20;
  paint.font = "12px system-ui, sans-serif";
  for (const row of panel.querySelectorAll(".u-legend .u-series:not(:first-child, .pale, .u-off)")) {
    const label = row.querySelector(".u-label").textContent;
    paint.fillStyle = getComputedStyle(row.querySelector(".u-marker")).borderTopColor;
    paint.fillRect(place, MARGIN + TITLE / 2 - 2, 12, 4);
    paint.fillStyle = style().getPropertyValue("--muted");
    paint.fillText(label, place + 17, MARGIN + TITLE / 2);
    place += 34 + paint.measureText(label).width;
  }
  paint.drawImage(canvas, MARGIN, MARGIN + TITLE, canvas.clientWidth, canvas.clientHeight);
  return picture;
}

function save(panel, heading) {
  const link = document.createElement("a");
  link.href = drawn(panel, heading).toDataURL("image/png");
  link.download = `${document.querySelector("h1").textContent}, ${heading}.png`.replace(/[^\p{L}\p{N} ,.()-]+/gu, "-");
  link.click();
}

document.addEventListener("click", ({ target }) => {
  const button = target.closest(".plot-tools button");
  if (!button) return;
  const panel = button.closest(".panel");
  if (button.dataset.png) save(panel, button.dataset.png);
  else if (document.fullscreenElement) document.exitFullscreen();
  else panel.requestFullscreen();
});
document.addEventListener("fullscreenchange", () => {
  for (const button of document.querySelectorAll("[data-whole]")) {
    button.setAttribute("aria-pressed", String(button.closest(".panel") === document.fullscreenElement));
  }
});
