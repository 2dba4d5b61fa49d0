// What is live on every page of a job: one stream of events feeds the numbers, the plots and the parts that the server
// makes.

import { count, done, duration, loss, percent, perplexity, rate, score, tested } from "./format.js";
import { everySecond, now, refresher } from "./live.js";
import { asScored, plots } from "./plots.js";
import { allSeries } from "./series.js";
import { choose, keepZoom, view } from "./view.js";

const ENDED = ["completed", "failed", "cancelled"];
const MATTERS = ["name", "status", "reason", "started_at", "pause_after", "resume_at"]; // what the reader should see at once
const TOLD = ["created", "pausing", "chosen", "opened", "recovered", "went_back", "reducer", "joined", "left", "recalled", "edited", "closed", "reassigned", "placed", "refused", "suspected", "doubted", "republished", "unscored", "checkpoint", "scored", "tested", "held", "paused", "resumed", "retried", "banned", "unbanned", "unfit"];
export const page = JSON.parse(document.getElementById("page-data").textContent);
const values = document.getElementById("values");
const series = {};
const byClass = document.getElementById("by-class"); // null: it does not classify
export const refresh = refresher(() => `${page.paths.parts}?table=${values.open}&classes=${byClass?.open ?? false}`, 2000);
let job = page.job;
const { part } = page; // of the data: versions are scored on it
let lastEventId = job.last_event_id;
const textual = document.querySelector("[data-field=perplexity]") !== null; // it trains a language model
let lowest = page.lowest; // { version, value } of the test loss, null until there is one
const watchers = []; // called with every newer snapshot
let sent = job; // the snapshot that the traffic of versions is counted from
readSeries(page.series);

function readSeries(columns) {
  Object.assign(series, allSeries(columns));
}

// The numbers

const left = () => (job.left_s === null ? "" : `${duration(job.left_s)} left`);

// Seconds from the first worker's joining to the end, or to now, without its pauses.
function elapsed() {
  if (!job.started_at) return 0;
  const until = job.finished_at ?? job.paused_at;
  return ((until ? Date.parse(until) : now()) - Date.parse(job.started_at)) / 1000 - job.stopped_s;
}

function speed() {
  if (job.status === "running") return `${rate((60 * job.samples_per_s) / page.round_samples)} rounds a minute`;
  if (job.version && job.finished_at && elapsed()) return `${rate((60 * job.version) / elapsed())} rounds a minute on average`;
  return "";
}

const FIELDS = {
  done: () => done(job.version, job.rounds_total),
  version: () => count(job.version),
  epoch: () => count(job.epoch + 1),
  left,
  speed,
  accuracy: () => percent(job.accuracy),
  test_loss: () => (textual && job.test_loss !== null ? `${loss(job.test_loss)} nats` : loss(job.test_loss)),
  perplexity: () => (job.perplexity === null ? "–" : job.perplexity.toFixed(2)),
  tested: () => tested(job.tested),
  tested_of: () => (job.tested ? `best (version ${count(job.tested.version)})${job.tested_last ? `; last ${tested(job.tested_last)}` : ""}` : ""),
  loss: () => loss(job.loss),
  samples_per_s: () => (job.status === "running" ? rate(job.samples_per_s) : "–"),
  workers: () => count(job.workers),
  elapsed: () => (job.started_at ? duration(elapsed()) : "–"),
};

function setText(element, text) {
  if (element && element.textContent !== text) element.textContent = text;
}

const field = (name) => document.querySelector(`[data-field="${name}"]`);

function showBest(name, text) {
  setText(document.querySelector(`[data-best="${name}"]`), text);
}

function show() {
  for (const [name, text] of Object.entries(FIELDS)) setText(field(name), text());
  for (const place of document.querySelectorAll("[data-metric]")) setText(place, loss(job.own_metrics?.[place.dataset.metric]));
  setText(document.getElementById("title"), job.title);
  field("bar").value = job.version;
  document.getElementById("plots").hidden = !job.version; // nothing to draw yet
  document.querySelector("#updated time").dateTime = job.updated_at;
  document.getElementById("updated").hidden = ENDED.includes(job.status); // it says when it ended
  const state = job.status === "running" ? FIELDS.done() : job.status[0].toUpperCase() + job.status.slice(1);
  document.title = `${state} · ${job.title} – ComputeShare`;
  if (lowest) showBest("loss", `lowest ${part} loss ${loss(lowest.value)} at version ${count(lowest.version)}`);
  if (job.best_version !== null) {
    const best = `best ${score(job.best_accuracy, job.best_loss, textual)} at version ${count(job.best_version)}`;
    for (const plot of ["accuracy", "perplexity"]) showBest(plot, best);
  }
}

// The events

const takesLate = document.querySelector("[data-plot=staleness]") !== null;
const valuesOf = ({ loss, samples_per_s, staleness, consensus }) => ({
  train_loss: loss,
  samples_per_s,
  staleness: takesLate ? (staleness ?? 0) : null,
  consensus: consensus ?? null,
});

const start = () => Date.parse(job.started_at ?? job.created_at) / 1000;
const drawn = (line) => ({ ...line, series: series[line.name], start: start() });
const changed = plots((lines) => lines.map((line) => drawn(asScored(line, part))), view, keepZoom);
choose(() => changed(true));

// What each of the versions since the snapshot before has sent, on average.
function countTraffic(snapshot) {
  const versions = snapshot.version - sent.version;
  if (versions > 0) {
    const at = Date.parse(snapshot.updated_at) / 1000;
    for (const name of ["bytes_up", "bytes_down"]) {
      const growth = (snapshot[name] - sent[name]) / versions;
      series[name].put(snapshot.version, at, growth);
    }
  }
  if (versions) sent = snapshot;
}

// Has the page show a newer snapshot.
function take(snapshot) {
  if (snapshot.chosen !== job.chosen) return location.reload(); // rounds and their number are others now
  job = snapshot;
  show();
  for (const watcher of watchers) watcher(job);
}

// Has a function called with every newer snapshot of the job.
export const watch = (watcher) => watchers.push(watcher);

// Has the page show a snapshot that an action was answered with, and follow a job that goes on because of it.
export function changedTo(snapshot) {
  const ended = ENDED.includes(job.status);
  HANDLERS.job(snapshot);
  if (ended && !ENDED.includes(job.status)) begin();
}

const HANDLERS = {
  job(snapshot) {
    const other = MATTERS.some((name) => snapshot[name] !== job[name]);
    take(snapshot);
    countTraffic(snapshot);
    refresh(other);
  },
  version({ at, data }) {
    const seconds = Date.parse(at) / 1000;
    for (const [name, value] of Object.entries(valuesOf(data))) series[name].put(data.version, seconds, value);
    changed();
  },
  scored({ at, data }) {
    const seconds = Date.parse(at) / 1000;
    series[`${part}_loss`].put(data.version, seconds, data.loss);
    series[`${part}_accuracy`].put(data.version, seconds, data.accuracy);
    series.perplexity.put(data.version, seconds, textual ? perplexity(data.loss) : null);
    for (const [name, value] of Object.entries(data.own_metrics ?? {})) series[`own_metrics.${name}`]?.put(data.version, seconds, value);
    if (data.loss !== null && (!lowest || data.loss < lowest.value)) lowest = { version: data.version, value: data.loss };
    changed();
    refresh();
  },
  opened({ data }) {
    for (const one of Object.values(series)) one.cut(data.version);
    if (lowest?.version > data.version) lowest = series[`${part}_loss`].best((a, b) => a < b);
    changed();
    refresh(true); // what the page said of the lost versions is no longer so
  },
};

// Following: by events while the page is looked at, by a snapshot now and then while it is not. (A browser opens only
// a few connections to one server, and hidden tabs would use them up.)

const connection = document.getElementById("connection");
const REST_MS = 10_000;
let source = null;
let timer = null;

function listen() {
  source?.close();
  source = new EventSource(`${page.paths.events}?after=${lastEventId}`);
  for (const type of ["job", "version", ...ENDED, ...TOLD]) {
    source.addEventListener(type, (event) => {
      lastEventId = event.lastEventId || lastEventId;
      (HANDLERS[type] ?? (() => refresh()))(JSON.parse(event.data));
    });
  }
  source.addEventListener("deleted", () => location.reload()); // which says so
  source.addEventListener("open", () => setText(connection, ""));
  source.addEventListener("error", () => {
    if (ENDED.includes(job.status)) {
      source.close();
      return lookAgain();
    }
    setText(connection, ", reconnecting");
    if (source.readyState === EventSource.CLOSED) later(catchUp, 3000); // the server answered, but not with events
  });
}

function later(task, pause_ms) {
  clearTimeout(timer);
  timer = setTimeout(task, pause_ms);
}

async function read(path) {
  const answer = await fetch(path);
  if ([401, 404].includes(answer.status)) location.reload(); // which says that it was deleted, or how to log in
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.json();
}

// Starts over from what the server knows now.
async function catchUp() {
  try {
    const fresh = await read(page.paths.data);
    readSeries(fresh.series);
    lowest = fresh.lowest;
    sent = fresh.job;
    lastEventId = fresh.job.last_event_id;
    HANDLERS.job(fresh.job);
    changed();
    setText(connection, "");
    if (ENDED.includes(job.status)) lookAgain();
    else if (!document.hidden) listen();
  } catch {
    setText(connection, ", reconnecting");
    later(catchUp, 3000);
  }
}

async function rest() {
  if (!document.hidden) return;
  source?.close();
  try {
    take(page.paths.job ? await read(page.paths.job) : (await read(page.paths.data)).job);
  } catch {
    // The next look may find the server.
  }
  if (!ENDED.includes(job.status)) later(rest, REST_MS);
}

// A job that failed may be retried elsewhere.
function lookAgain() {
  if (job.status === "failed") later(document.hidden ? lookAgain : catchUp, REST_MS);
}

function follow() {
  clearTimeout(timer);
  if (document.hidden) rest();
  else catchUp();
}

function begin() {
  if (document.hidden) rest();
  else listen();
}

values.open = false; // it is there for those without plots
values.addEventListener("toggle", () => values.open && refresh(true));
byClass?.addEventListener("toggle", () => byClass.open && refresh(true));
everySecond(() => setText(field("elapsed"), FIELDS.elapsed()));
show();
document.addEventListener("visibilitychange", follow);
if (ENDED.includes(job.status)) lookAgain();
else begin();
