// The two plots of a job: loss and accuracy by version. uPlot draws; colours are the style sheet's.

/* global uPlot */
import { count, loss, percent } from "./format.js";

const HEIGHT = 240;
const PAUSE_MS = 400;
const compact = new Intl.NumberFormat("en-US", { notation: "compact" });
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const told = (value) => (_, at) => (at === null || at === undefined ? "–" : value(at));

const axis = (values, size) => ({
  stroke: colour("--muted"),
  grid: { stroke: colour("--line"), width: 1 },
  ticks: { show: false },
  font: "12px system-ui, sans-serif",
  values: (_, ticks) => ticks.map(values),
  size,
});

const line = (label, name, width, points, value) => ({
  label,
  stroke: colour(name),
  width,
  points: points ? { show: true, size: 5, fill: colour(name) } : { show: false },
  value: told(value),
});

const wholes = [...Array(9).keys()].flatMap((exponent) => [1, 2, 5].map((n) => n * 10 ** exponent));

function options(width, lines, tick, range) {
  return {
    width,
    height: HEIGHT,
    padding: [8, 12, 0, 0],
    cursor: { drag: { x: false, y: false }, sync: { key: "versions" }, points: { size: 7 } },
    scales: {
      x: { time: false, range: (_, low, high) => [0, Math.max(high ?? 0, 10)] },
      y: { range: (_, low, high) => (high === null ? [0, 1] : range(low, high)) },
    },
    axes: [{ ...axis((at) => compact.format(at), 32), incrs: wholes }, axis(tick, 56)],
    series: [{ label: "Version", value: told(count) }, ...lines],
    legend: { markers: { width: 2 } },
  };
}

function lossOptions(width) {
  const lines = [line("Training", "--train", 1, false, loss), line("Test", "--test", 2, true, loss)];
  return options(width, lines, loss, (_, high) => [0, 1.05 * high || 1]);
}

function accuracyOptions(width) {
  const around = (low, high) => Math.max(0.01, 0.08 * (high - low));
  const range = (low, high) => [Math.max(0, low - around(low, high)), Math.min(1, high + around(low, high))];
  return options(width, [line("Test", "--test", 2, true, percent)], (at) => `${+(at * 100).toFixed(2)} %`, range);
}

const PLOTS = {
  loss: { names: ["train_loss", "test_loss"], options: lossOptions },
  accuracy: { names: ["test_accuracy"], options: accuracyOptions },
};

const tables = (plot, series) => uPlot.join(plot.names.map((name) => [series[name].versions, series[name].values]));

// Draws `series` (by name) into the elements marked with data-plot; returns a function that says they have changed.
export function plots(series) {
  const drawn = new Map();
  let planned = false;
  let last = 0;

  function build(place) {
    const plot = PLOTS[place.dataset.plot];
    drawn.get(place)?.destroy();
    drawn.set(place, new uPlot(plot.options(place.clientWidth), [[]], place));
    fill(place);
  }

  function fill(place) {
    const data = tables(PLOTS[place.dataset.plot], series);
    drawn.get(place).setData(data);
    place.classList.toggle("without-data", !data[0].length);
    place.dataset.points = data[0].length;
  }

  function draw() {
    [planned, last] = [false, performance.now()];
    [...drawn.keys()].forEach(fill);
  }

  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const width = target.clientWidth;
      if (width && width !== drawn.get(target).width) drawn.get(target).setSize({ width, height: HEIGHT });
    }
  });
  for (const place of document.querySelectorAll("[data-plot]")) {
    build(place);
    resized.observe(place);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => [...drawn.keys()].forEach(build));

  return function changed() {
    if (planned) return;
    planned = true;
    setTimeout(() => requestAnimationFrame(draw), Math.max(0, last + PAUSE_MS - performance.now()));
  };
}
