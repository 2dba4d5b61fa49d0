// The log of a job, live while its panel is open and the page is looked at. The rows are those of templates/parts/logs.html.

const MOST = 500; // rows in the document
const FIRST = 100;
const AGAIN_MS = 3000;
const SERVICES = ["reducer", "evaluator"];
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const moment = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "long" });

function element(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// As loglines.fields_text has it.
function said(data) {
  const word = (value) => {
    const text = typeof value === "string" ? value : JSON.stringify(value);
    return text === "" || text.includes(" ") ? `"${text}"` : text;
  };
  return Object.entries(data).filter(([name]) => name !== "exception").map(([name, value]) => `${name}=${word(value)}`).join(" ");
}

// Has a time element say its time as it is where the reader is.
function tellTime(time) {
  const at = Date.parse(time.dateTime);
  time.textContent = clock.format(at);
  time.title = moment.format(at);
}

function row(line) {
  const item = element("li", "", `log-${line.level}`);
  const time = document.createElement("time");
  time.dateTime = line.at;
  tellTime(time);
  const writer = element("b", SERVICES.includes(line.worker) ? line.worker : line.name || line.worker);
  writer.title = line.name;
  item.append(time, " ", writer, " ", element("i", line.level), " ", element("span", line.text));
  const fields = said(line.data);
  if (fields) item.append(" ", element("small", fields));
  if ("exception" in line.data) {
    const trace = document.createElement("details");
    trace.append(element("summary", "Traceback"), element("pre", line.data.exception));
    item.append(trace);
  }
  return item;
}

// Brings the panel `root` to life.
export function logs(root, jobId) {
  const view = root.querySelector(".log-lines");
  const list = view.querySelector("ol");
  const form = root.querySelector(".log-filters");
  const state = root.querySelector(".log-state");
  const button = root.querySelector(".log-follow");
  const address = `/v1/jobs/${encodeURIComponent(jobId)}/logs`;
  let last = Number(root.dataset.last);
  let source = null;
  let timer = null;
  let waiting = []; // lines that came since the last frame, or while the reader looks at older ones
  let following = true;
  let ended = false;
  let turn = 0; // of what is wanted: answers to what was wanted before are of no use

  function wanted(more = {}) {
    const query = new URLSearchParams(more);
    if (form.elements.log_worker.value) query.set("worker", form.elements.log_worker.value);
    if (form.elements.log_level.value) query.set("level", form.elements.log_level.value);
    return query;
  }

  const isAtEnd = () => view.scrollHeight - view.scrollTop - view.clientHeight < 8;

  function toEnd() {
    view.scrollTop = view.scrollHeight;
  }

  function tell() {
    button.hidden = following;
    if (!following) button.textContent = waiting.length ? `Follow: ${waiting.length} new` : "Follow";
  }

  // Writers that were not there when the page was made.
  function note(line) {
    const select = form.elements.log_worker;
    if ([...select.options].some((option) => option.value === line.worker)) return;
    const name = SERVICES.includes(line.worker) ? line.worker : `${line.name || line.worker} (${line.worker})`;
    select.add(new Option(name, line.worker));
  }

  function show() {
    waiting = waiting.slice(-MOST);
    if (following && waiting.length) {
      list.append(...waiting.map(row));
      waiting.forEach(note);
      waiting = [];
      while (list.children.length > MOST) list.firstElementChild.remove();
      toEnd();
    }
    tell();
  }

  function take(line) {
    last = Math.max(last, line.id);
    if (waiting.push(line) === 1 || !following) requestAnimationFrame(show);
  }

  function rest() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }

  function listen() {
    rest();
    if (!root.open || document.hidden || ended) return;
    const own = new EventSource(`${address}/stream?${wanted({ after: last })}`);
    source = own;
    own.addEventListener("open", () => (state.textContent = "live"));
    own.addEventListener("line", (event) => own === source && take(JSON.parse(event.data)));
    own.addEventListener("end", () => {
      ended = true;
      state.textContent = "the job has ended";
      rest();
    });
    own.addEventListener("error", () => {
      if (own !== source) return;
      state.textContent = "reconnecting";
      if (own.readyState === EventSource.CLOSED) timer = setTimeout(listen, AGAIN_MS); // the server answered, not with lines
    });
  }

  // Shows the newest of the lines that are wanted by now, and keeps what is wanted in the page's address.
  async function choose() {
    const mine = ++turn;
    rest();
    const place = new URL(location.href);
    for (const name of ["log_worker", "log_level"]) {
      const { value } = form.elements[name];
      if (value) place.searchParams.set(name, value);
      else place.searchParams.delete(name);
    }
    history.replaceState(history.state, "", place);
    try {
      const answer = await fetch(`${address}?${wanted({ limit: FIRST })}`);
      if (!answer.ok) throw new Error(answer.statusText);
      const { items } = await answer.json();
      if (mine !== turn) return;
      list.replaceChildren(...items.map(row));
      [waiting, following, ended] = [[], true, false];
      last = items.at(-1)?.id ?? 0;
      toEnd();
      tell();
      listen();
    } catch {
      state.textContent = "reconnecting";
      if (mine === turn) timer = setTimeout(choose, AGAIN_MS);
    }
  }

  view.addEventListener("scroll", () => {
    const before = following;
    following = isAtEnd();
    if (following !== before) show();
  });
  button.addEventListener("click", () => {
    following = true;
    show();
    toEnd();
    view.focus({ preventScroll: true });
  });
  form.addEventListener("change", choose);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    choose();
  });
  root.addEventListener("toggle", () => {
    if (root.open && following) toEnd();
    ended = false; // it may have been tried again
    listen();
  });
  document.addEventListener("visibilitychange", listen);
  list.querySelectorAll("time").forEach(tellTime);
  if (root.open) toEnd();
  listen();
}
