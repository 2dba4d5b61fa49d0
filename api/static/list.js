// The lists of jobs and of workers, kept fresh while they are looked at.

import { everySecond, refresher } from "./live.js";

const refresh = refresher(() => location.href, 3000);

everySecond(() => refresh());
