// Jobs side by side: each plot has every job's lines, in its colour.

import { everySecond, refresher } from "./live.js";
import { plots } from "./plots.js";
import { allSeries } from "./series.js";
import { choose, keepZoom, view } from "./view.js";

const AGAIN_MS = 5000;
const page = document.getElementById("page-data");
let jobs = read(JSON.parse(page.textContent));

function read(data) {
  return data.map(({ title, start, series }) => ({ title, start, series: allSeries(series) }));
}

// A job's scores: on its validation split, if it has one.
function scores(series, name) {
  const held = series[name.replace("test_", "validation_")];
  return held?.versions.length ? held : series[name];
}

// Every job's lines in its own colour; the second kind of a plot is dashed.
function linesOf(lines) {
  return jobs.flatMap(({ title, start, series }, number) =>
    lines.map((line, kind) => ({
      ...line,
      label: lines.length > 1 ? `${title}: ${line.label.toLowerCase()}` : title,
      colour: `--line-${number + 1}`,
      dash: kind ? [6, 4] : undefined,
      series: scores(series, line.name),
      start,
    })),
  );
}

const changed = plots(linesOf, view, keepZoom);
choose(() => changed(true));

async function again() {
  try {
    const answer = await fetch(`/compare/data${location.search}`);
    if (answer.ok) jobs = read(await answer.json());
    changed();
  } catch {
    // The server is away: the next turn asks again.
  }
}

if (page.dataset.moving) {
  const refresh = refresher(() => location.href, AGAIN_MS);
  let turns = 0;
  everySecond(() => {
    refresh();
    turns += 1;
    if (turns % (AGAIN_MS / 1000) === 0) again();
  });
}
