// A job's page, live: one stream of events feeds the numbers, the plots and the parts that the server makes.

import { count, done, duration, loss, percent, rate } from "./format.js";
import { everySecond, now, refresher } from "./live.js";
import { plots } from "./plots.js";
import { Series } from "./series.js";

const ENDED = ["completed", "failed", "cancelled"];
const TOLD = ["created", "chosen", "opened", "recovered", "went_back", "reducer", "joined", "left", "closed", "reassigned", "refused", "checkpoint", "scored", "held", "paused", "resumed", "retried", "banned", "unbanned"];
const page = JSON.parse(document.getElementById("page-data").textContent);
const values = document.getElementById("values");
const series = {};
for (const [name, points] of Object.entries(page.series)) series[name] = new Series(points);
const refresh = refresher(() => `/jobs/${page.job.id}/parts${values.open ? "?table=true" : ""}`, 2000);
let job = page.job;
let lastEventId = job.last_event_id;

// The numbers

function left() {
  if (job.status !== "running" || !job.samples_per_s) return "";
  return `${duration(((job.rounds_total - job.version) * page.round_samples) / job.samples_per_s)} left`;
}

// Seconds from the first worker's joining to the end, or to now.
function elapsed() {
  if (!job.started_at) return 0;
  return ((job.finished_at ? Date.parse(job.finished_at) : now()) - Date.parse(job.started_at)) / 1000;
}

function speed() {
  if (job.status === "running") return `${rate((60 * job.samples_per_s) / page.round_samples)} rounds a minute`;
  if (job.finished_at && elapsed()) return `${rate((60 * job.version) / elapsed())} rounds a minute on average`;
  return "";
}

const FIELDS = {
  done: () => done(job.version, job.rounds_total),
  version: () => count(job.version),
  epoch: () => count(job.epoch + 1),
  left,
  speed,
  accuracy: () => percent(job.accuracy),
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
  field("bar").value = job.version;
  document.querySelector("#updated time").dateTime = job.updated_at;
  const state = job.status === "running" ? FIELDS.done() : job.status[0].toUpperCase() + job.status.slice(1);
  document.title = `${state} · ${job.title} – ComputeShare`;
  const lowest = series.test_loss.best((a, b) => a < b);
  const highest = series.test_accuracy.best((a, b) => a > b);
  if (lowest) showBest("loss", `lowest test loss ${loss(lowest.value)} at version ${count(lowest.version)}`);
  if (highest) showBest("accuracy", `best ${percent(highest.value)} at version ${count(highest.version)}`);
}

// The events

const changed = plots(series);

const HANDLERS = {
  job(snapshot) {
    const other = snapshot.status !== job.status || snapshot.reason !== job.reason || !job.started_at !== !snapshot.started_at;
    job = snapshot;
    show();
    refresh(other);
  },
  version({ data }) {
    series.train_loss.put(data.version, data.loss);
    changed();
  },
  scored({ data }) {
    series.test_loss.put(data.version, data.loss);
    series.test_accuracy.put(data.version, data.accuracy);
    changed();
    refresh();
  },
  chosen: () => location.reload(), // rounds and their number are others now
  opened({ data }) {
    for (const one of Object.values(series)) one.cut(data.version);
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
  source = new EventSource(`/v1/jobs/${job.id}/events?after=${lastEventId}`);
  for (const type of ["job", "version", ...ENDED, ...TOLD]) {
    source.addEventListener(type, (event) => {
      lastEventId = event.lastEventId || lastEventId;
      (HANDLERS[type] ?? (() => refresh()))(JSON.parse(event.data));
    });
  }
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
  const answer = await fetch(`/v1/jobs/${job.id}${path}`);
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.json();
}

// Starts over from what the server knows now.
async function catchUp() {
  try {
    const snapshot = await read("");
    const metrics = await read("/metrics?points=1000");
    for (const name of Object.keys(series)) series[name] = new Series(metrics[name].map((point) => [point.version, point.value]));
    lastEventId = snapshot.last_event_id;
    HANDLERS.job(snapshot);
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
    job = await read("");
    show();
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

// Pausing, resuming, trying again

const DONE = { pause: "paused", resume: "resumed", retry: "retried" };
const actionProblem = document.getElementById("action-problem");
let asking = false;

async function change(verb) {
  if (asking) return;
  asking = true;
  setText(actionProblem, "");
  try {
    const answer = await fetch(`/v1/jobs/${job.id}/${verb}`, { method: "POST" });
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.detail);
    const ended = ENDED.includes(job.status);
    HANDLERS.job(body);
    if (ended) begin();
  } catch (error) {
    setText(actionProblem, `The job was not ${DONE[verb]}: ${error.message}`);
    refresh(true);
  } finally {
    asking = false;
  }
}

// Lifting a worker's ban

async function unban(worker) {
  setText(actionProblem, "");
  try {
    const answer = await fetch(`/v1/jobs/${job.id}/workers/${encodeURIComponent(worker)}/unban`, { method: "POST" });
    if (!answer.ok) throw new Error((await answer.json()).detail);
  } catch (error) {
    setText(actionProblem, `The ban was not lifted: ${error.message}`);
  }
  refresh(true);
}

// Cancelling

const dialog = document.getElementById("confirm");
const problem = document.getElementById("confirm-problem");

async function cancel() {
  setText(problem, "");
  try {
    const answer = await fetch(`/v1/jobs/${job.id}/cancel`, { method: "POST" });
    if (!answer.ok) throw new Error((await answer.json()).detail);
    dialog.close();
    refresh(true);
  } catch (error) {
    setText(problem, `The job was not cancelled: ${error.message}`);
  }
}

document.addEventListener("click", ({ target }) => {
  if (target.closest("#cancel")) dialog.showModal();
  if (target.closest("#confirm-cancel")) cancel();
  const verb = target.closest("[data-verb]")?.dataset.verb;
  if (verb) change(verb);
  const banned = target.closest("[data-unban]")?.dataset.unban;
  if (banned) unban(banned);
});

values.open = false; // it is there for those without plots
values.addEventListener("toggle", () => values.open && refresh(true));
everySecond(() => setText(field("elapsed"), FIELDS.elapsed()));
show();
document.addEventListener("visibilitychange", follow);
if (ENDED.includes(job.status)) lookAgain();
else begin();
