// A series of values by version and time that stays small however long a job runs.

export const LIMIT = 2000;

export class Series {
  constructor() {
    this.versions = [];
    this.times = []; // seconds since the epoch
    this.values = [];
  }

  // From columns of equal length; a version without a value is no point.
  static of({ version, at }, values) {
    const series = new Series();
    version.forEach((number, index) => series.put(number, at[index], values[index]));
    return series;
  }

  // Adds a value, or replaces the one that the version had.
  put(version, time, value) {
    if (typeof value !== "number") return;
    let at = this.versions.length;
    while (at > 0 && this.versions[at - 1] >= version) at -= 1;
    const replaced = this.versions[at] === version ? 1 : 0;
    this.versions.splice(at, replaced, version);
    this.times.splice(at, replaced, time);
    this.values.splice(at, replaced, value);
    if (this.versions.length > LIMIT) this.thin();
  }

  // Forgets what comes after a version: the job went on from there.
  cut(version) {
    while (this.versions.at(-1) > version) {
      this.versions.pop();
      this.times.pop();
      this.values.pop();
    }
  }

  // The point with the best value by `better(a, b)`, or null.
  best(better) {
    let best = -1;
    this.values.forEach((value, at) => {
      if (best < 0 || better(value, this.values[best])) best = at;
    });
    return best < 0 ? null : { version: this.versions[best], value: this.values[best] };
  }

  // Where the points lie: by version, or in seconds since `start`, which never go back.
  places(across, start) {
    if (across === "version") return this.versions;
    let last = 0;
    return this.times.map((time) => (last = Math.max(last, time - start)));
  }

  // Halves the series: of every four points the lowest and the highest stay, and the last of all.
  thin() {
    const kept = [];
    const last = this.versions.length - 1;
    for (let start = 0; start < last; start += 4) {
      const four = [start, start + 1, start + 2, start + 3].filter((at) => at < last);
      four.sort((a, b) => this.values[a] - this.values[b]);
      kept.push(...[...new Set([four[0], four.at(-1)])].sort((a, b) => a - b));
    }
    kept.push(last);
    this.versions = kept.map((at) => this.versions[at]);
    this.times = kept.map((at) => this.times[at]);
    this.values = kept.map((at) => this.values[at]);
  }
}

// All series by name, from the columns of versions and of scores as the server has them.
export function allSeries({ versions, scores }) {
  const found = {};
  for (const columns of [versions, scores]) {
    for (const [name, values] of Object.entries(columns)) {
      if (name !== "version" && name !== "at") found[name] = Series.of(columns, values);
    }
  }
  return found;
}

// An exponential moving average that begins at the first value instead of at zero; `weight` (0 to 1) is the past's.
export function smoothed(values, weight) {
  let [average, left] = [0, 1];
  return values.map((value) => {
    average = weight * average + (1 - weight) * value;
    left *= weight;
    return average / (1 - left);
  });
}
