// A series of values by version that stays small however long a job runs.

export const LIMIT = 2000;

export class Series {
  constructor(points = []) {
    this.versions = [];
    this.values = [];
    for (const [version, value] of points) this.put(version, value);
  }

  // Adds a value, or replaces the one that the version had; a version without a value is no point.
  put(version, value) {
    if (typeof value !== "number") return;
    let at = this.versions.length;
    while (at > 0 && this.versions[at - 1] >= version) at -= 1;
    const replaced = this.versions[at] === version ? 1 : 0;
    this.versions.splice(at, replaced, version);
    this.values.splice(at, replaced, value);
    if (this.versions.length > LIMIT) this.thin();
  }

  // Forgets what comes after a version: the job went on from there.
  cut(version) {
    while (this.versions.at(-1) > version) {
      this.versions.pop();
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
    this.values = kept.map((at) => this.values[at]);
  }
}
