// Plots of series by version or by time. uPlot draws; colours are the style sheet's.

/* global uPlot */
import { count, duration, loss, percent, rate, size } from "./format.js";
import "./plot_tools.js";
import { smoothed } from "./series.js";

const HEIGHT = 240;
const PAUSE_MS = 400;
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 2 });
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const told = (value) => (_, at) => (at === null || at === undefined ? "–" : value(at));
// A plot is as high as the screen where it has the whole of it.
const heightOf = (place) => (place.closest(":fullscreen") ? Math.max(HEIGHT, innerHeight - 140) : HEIGHT);
const tick = (value) => (at) => (at === null ? "" : value(at));

const wholes = [...Array(13).keys()].flatMap((exponent) => [1, 2, 5].map((n) => n * 10 ** exponent));
const spans = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];
const ACROSS = {
  version: { label: "Version", value: count, tick: (at) => compact.format(at), incrs: wholes, least: 10 },
  time: { label: "Time", value: duration, tick: duration, incrs: spans, least: 1 },
};

const fromZero = (_, high) => [0, 1.05 * high || 1];
function withinOne(low, high) {
  const around = Math.max(0.01, 0.08 * (high - low));
  return [Math.max(0, low - around), Math.min(1, high + around)];
}

// What is drawn where: series by name, in the colours named. `log`: whether a logarithmic scale says anything.
const PLOTS = {
  loss: {
    lines: [{ name: "train_loss", label: "Training", colour: "--train", smooth: true }, { name: "test_loss", label: "Test", colour: "--test" }],
    value: loss, range: fromZero, log: true,
  },
  accuracy: {
    lines: [{ name: "test_accuracy", label: "Test", colour: "--test" }],
    value: percent, tick: (at) => `${+(at * 100).toFixed(2)} %`, range: withinOne, log: false,
  },
  perplexity: {
    lines: [{ name: "perplexity", label: "Test", colour: "--test" }],
    value: (at) => at.toFixed(2), tick: (at) => compact.format(at), range: fromZero, log: true,
  },
  own: {
    lines: [{ name: "", label: "Score", colour: "--test" }], // the place names the series
    value: loss, range: (low, high) => [Math.min(0, 1.05 * low), Math.max(0, 1.05 * high) || 1], log: true,
  },
  speed: {
    lines: [{ name: "samples_per_s", label: "Samples/s", colour: "--train", smooth: true }],
    value: rate, tick: (at) => compact.format(at), range: fromZero, log: true,
  },
  bytes: {
    lines: [
      { name: "bytes_up", label: "Up", colour: "--train", smooth: true },
      { name: "bytes_down", label: "Down", colour: "--test", smooth: true, width: 1 },
    ],
    value: size, range: fromZero, log: true, incrs: wholes,
  },
  staleness: {
    lines: [{ name: "staleness", label: "Staleness (versions)", colour: "--train", smooth: true }],
    value: (at) => at.toFixed(2), tick: (at) => String(+at.toFixed(2)), range: fromZero, log: false,
  },
  consensus: {
    lines: [{ name: "consensus", label: "Distance", colour: "--train", smooth: true }],
    value: loss, range: fromZero, log: true,
  },
};

// Ticks say nothing where there is nothing to measure.
const axis = (values, place) => ({
  stroke: colour("--muted"),
  grid: { stroke: colour("--line"), width: 1 },
  ticks: { show: false },
  font: "12px system-ui, sans-serif",
  values: (chart, ticks) => ticks.map(chart.data[0].length ? tick(values) : () => ""),
  ...place,
});

// Whether a line has one value only, of which nothing would be seen without a point.
const isAlone = (chart, line) => chart.data[line].filter((value) => typeof value === "number").length === 1;

// A line of a plot: thin where it is noisy, with points where there are few values.
function stroke({ label, colour: name, dash, smooth, width }, value) {
  const paint = colour(name);
  const points = { show: smooth ? isAlone : true, size: 5, fill: paint };
  return { label, stroke: paint, width: width ?? (smooth ? 1 : 2), dash, points, value: told(value) };
}

// The lines as they are drawn: behind a smoothed one lies what it was made of, pale.
function strokes(plot, lines, view) {
  return lines.flatMap((line) => {
    const drawn = stroke(line, plot.value);
    if (!line.smooth || !view.smooth) return [drawn];
    return [{ ...drawn, alpha: 0.3, class: "pale" }, { ...drawn, label: `${line.label}, smoothed`, width: 2 }];
  });
}

// A plot's drawing; `span()` is the range of x, `zoomTo` is told the range that the reader selects, or null: all of it.
function options(plot, lines, view, width, span, zoomTo) {
  const across = ACROSS[view.across];
  const logarithmic = view.log && plot.log;
  const y = logarithmic
    ? { distr: 3, range: (_, low, high) => (high === null ? [0.1, 1] : uPlot.rangeLog(low, high, 10, false)) }
    : { range: (_, low, high) => (high === null ? [0, 1] : plot.range(low, high)) };
  return {
    width,
    height: HEIGHT,
    padding: [8, 12, 0, 0],
    cursor: {
      drag: { x: true, y: false, setScale: false, dist: 5 },
      bind: { dblclick: () => () => zoomTo(null) },
      sync: { key: "versions", scales: ["x", null], filters: { pub: (type) => type === "mousemove" } }, // one of them zooms all
      points: { size: 7 },
    },
    hooks: {
      setSelect: [(chart) => {
        const { left, width: wide } = chart.select;
        if (wide > 0) zoomTo([chart.posToVal(left, "x"), chart.posToVal(left + wide, "x")]);
      }],
    },
    scales: { x: { time: false, range: span }, y },
    axes: [axis(across.tick, { size: 32, incrs: across.incrs, space: 64 }), axis(plot.tick ?? plot.value, { size: 62, incrs: plot.incrs })],
    series: [{ label: across.label, value: told(across.value) }, ...strokes(plot, lines, view)],
    legend: { markers: { width: 2 } },
  };
}

// Places and values of each line, as uPlot joins them.
function table(plot, lines, view) {
  const above = (values) => (view.log && plot.log ? values.map((value) => (value > 0 ? value : null)) : values);
  const columns = lines.flatMap(({ series, smooth, start }) => {
    const places = series.places(view.across, start);
    const raw = [places, above(series.values)];
    return smooth && view.smooth ? [raw, [places, above(smoothed(series.values, view.smooth))]] : [raw];
  });
  return uPlot.join(columns);
}

// A line of scores, on the part of the data that the job's versions are scored on.
export function asScored(line, part) {
  if (part === "test" || !line.name.startsWith("test_")) return line;
  return { ...line, name: line.name.replace("test", "validation"), label: "Validation" };
}

// Draws into the elements marked with data-plot; returns a function that says that the lines, or the view, have changed.
//
// `linesOf(name, lines)` gives each of a plot's lines its `series` (and `start`, in seconds): one for the job of a page,
// several where jobs are compared. `view` holds `across` (version or time), `log`, `smooth` (0 to 1) and `zoom`: the range
// of x that all plots show, null for everything there is. `keepZoom` is told the range that the reader chooses.
export function plots(linesOf, view, keepZoom) {
  const drawn = new Map();
  let planned = false;
  let last = 0;
  let span = [0, 1];

  function parts(place) {
    const plot = PLOTS[place.dataset.plot];
    const { series } = place.dataset;
    return [plot, linesOf(series ? [{ ...plot.lines[0], name: series }] : plot.lines)];
  }

  function build(place) {
    const [plot, lines] = parts(place);
    drawn.get(place)?.destroy();
    drawn.set(place, new uPlot(options(plot, lines, view, place.clientWidth || 320, () => span, zoomTo), [[]], place));
  }

  function fill(place, data) {
    const chart = drawn.get(place);
    chart.batch(() => {
      chart.setData(data, false);
      chart.setScale("x", { min: span[0], max: span[1] });
    });
    place.classList.toggle("without-data", !data[0].length);
    place.dataset.points = data[0].length;
    place.dataset.span = span.join(" ");
  }

  // Every plot has the same range of x, so that what stands below one another belongs together.
  function draw() {
    [planned, last] = [false, performance.now()];
    const tables = [...drawn.keys()].map((place) => [place, table(...parts(place), view)]);
    span = view.zoom ?? [0, Math.max(ACROSS[view.across].least, ...tables.map(([, [places]]) => places.at(-1) ?? 0))];
    for (const [place, data] of tables) fill(place, data);
  }

  function zoomTo(range) {
    for (const chart of drawn.values()) chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    keepZoom(range);
    draw();
  }

  function rebuild() {
    [...drawn.keys()].forEach(build);
    draw();
  }

  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const [width, height] = [target.clientWidth, heightOf(target)];
      const chart = drawn.get(target);
      if (width && (width !== chart.width || height !== chart.height)) chart.setSize({ width, height });
    }
  });
  for (const place of document.querySelectorAll("[data-plot]")) {
    build(place);
    resized.observe(place);
  }
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);

  return function changed(anew = false) {
    if (anew) return rebuild();
    if (planned) return;
    planned = true;
    setTimeout(() => requestAnimationFrame(draw), Math.max(0, last + PAUSE_MS - performance.now()));
  };
}
