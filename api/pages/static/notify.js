// A button that has this browser say when a job completes, fails or pauses by itself, also while its page is hidden.

import { loss, percent, tested } from "./format.js";

// What is to be said of a job that was `before` and is `job` now; null: nothing.
export function news(before, job) {
  if (job.status === before) return null;
  if (job.status === "completed") {
    if (job.tested) return `Completed, test ${job.metric} ${tested(job.tested)}`;
    if (job.accuracy !== null) return `Completed, ${percent(job.accuracy)} test accuracy`;
    return job.test_loss === null ? "Completed" : `Completed, test loss ${loss(job.test_loss)}`;
  }
  if (job.status === "failed") return `Failed: ${(job.error ?? "the cause is unknown").split("\n")[0].slice(0, 200)}`;
  if (job.status === "paused" && job.reason_code !== "user") return (job.reason ?? "Paused").slice(0, 200);
  return null;
}

// Whether nothing more will be heard of a job.
const over = (status) => ["completed", "cancelled"].includes(status);

function say(job, text) {
  try {
    const shown = new Notification(job.title, { body: text, tag: `${job.id}-${job.status}`, icon: "/static/icon.svg" });
    shown.addEventListener("click", () => {
      window.focus();
      shown.close();
    });
  } catch {
    // Some phones have the name and no notifications without a service worker.
  }
}

// Whether the user wants to hear of this job; where nothing can be kept, for as long as the page is open.
function kept(key) {
  let wanted = false;
  return {
    get: () => {
      try {
        return localStorage.getItem(key) === "yes";
      } catch {
        return wanted;
      }
    },
    set: (value) => {
      wanted = value;
      try {
        if (value) localStorage.setItem(key, "yes");
        else localStorage.removeItem(key);
      } catch {
        // Then for as long as the page is open.
      }
    },
  };
}

// Shows why there is no button: browsers let no page notify that may have been changed on its way.
function explain(place, job) {
  const show = ({ status }) => { place.hidden = over(status); };
  show(job);
  return show;
}

// Makes `button` (hidden at first) a switch for the notifications about `job`, as the API tells it, and returns a
// function to be called with every newer snapshot of that job. The permission is asked for by a click only.
export function notify(button, job) {
  if (!window.isSecureContext) return explain(document.getElementById("notify-why"), job);
  if (!button || !("Notification" in window)) return () => {};
  const choice = kept(`notify-${job.id}`);
  let status = job.status;

  function show() {
    const blocked = Notification.permission === "denied";
    const on = choice.get() && Notification.permission === "granted";
    button.hidden = over(status);
    button.disabled = blocked;
    button.setAttribute("aria-pressed", String(on));
    button.textContent = blocked ? "Notifications are blocked" : on ? "Notifications on" : "Notify me";
    button.title = blocked ? "Allow notifications for this page in the browser's settings" : "When the job completes, fails or pauses on its own";
  }

  button.addEventListener("click", async () => {
    const on = choice.get() && Notification.permission === "granted";
    choice.set(!on && (await Notification.requestPermission()) === "granted");
    show();
  });
  show();

  return (snapshot) => {
    const text = news(status, snapshot);
    status = snapshot.status;
    if (text && choice.get() && Notification.permission === "granted") say(snapshot, text);
    show();
  };
}
