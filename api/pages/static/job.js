// A job's page: what is live on it, and what a reader may do about the job.

import { actions } from "./actions.js";
import { changedTo, page, refresh, watch } from "./live_job.js";
import { logs } from "./logs.js";
import { managing } from "./managing.js";
import "./menu.js";
import { notes } from "./notes.js";
import { notify } from "./notify.js";
import { sharing } from "./sharing.js";

const { id } = page.job;
const followPriority = actions(id, { changed: changedTo, refresh: () => refresh(true) });

watch(notify(document.getElementById("notify"), page.job));
watch((job) => followPriority(job.priority));
managing({ renamed: changedTo, deleted: () => location.assign("/") });
notes(id, changedTo);
sharing(id);
logs(document.getElementById("logs"), id);

let { status } = page.job;
watch((job) => {
  if (job.status === "failed" && status !== "failed") document.getElementById("logs").open = true;
  status = job.status;
});
