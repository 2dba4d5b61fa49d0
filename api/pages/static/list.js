// The list of jobs, kept fresh while it is looked at.

import { everySecond, refresher } from "./live.js";

const refresh = refresher(() => location.href, 3000);

everySecond(() => refresh());
