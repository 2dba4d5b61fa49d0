// Numbers and times in words; the same words as services/wording.py, so that nothing jumps when the first event comes.

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0, roundingMode: "halfEven" });
const tenths = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1, roundingMode: "halfEven" });

export const count = (value) => whole.format(value);
export const rate = (value) => (value < 100 ? tenths : whole).format(value);
export const percent = (fraction) => (fraction === null ? "–" : `${(fraction * 100).toFixed(2)} %`);
export const done = (version, total) => `${Math.floor((100 * version) / Math.max(1, total))} %`;

export function loss(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e4)) {
    const [digits, exponent] = value.toExponential(3).split("e");
    return `${Number(digits)}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
  }
  return String(Number(value.toPrecision(4)));
}

export const perplexity = (nats) => (nats === null || nats >= 700 ? null : Math.exp(nats));

// A version's score: its accuracy, or its loss; of a language model (`textual`) with the perplexity.
export function score(accuracy, nats, textual) {
  if (accuracy !== null) return percent(accuracy);
  if (!textual) return nats === null ? "–" : `loss ${loss(nats)}`;
  const found = perplexity(nats);
  return found === null ? "–" : `${loss(nats)} nats, perplexity ${found.toFixed(2)}`;
}

// A version's score on the test set.
export function tested(found) {
  if (!found) return "–";
  return found.accuracy !== null ? percent(found.accuracy) : loss(found.loss);
}

export function duration(seconds) {
  const left = Math.max(0, Math.floor(seconds));
  const index = UNITS.findIndex(([length]) => left >= length);
  if (index < 0 || index === UNITS.length - 1) return `${left} s`;
  const [length, unit] = UNITS[index];
  const [smaller, smallUnit] = UNITS[index + 1];
  const rest = Math.floor((left % length) / smaller);
  return `${Math.floor(left / length)} ${unit}${rest ? ` ${rest} ${smallUnit}` : ""}`;
}

export function ago(seconds) {
  const left = Math.max(0, Math.floor(seconds));
  const [length, unit] = UNITS.find(([size]) => left >= size) ?? [1, "s"];
  return `${Math.floor(left / length)} ${unit} ago`;
}

export const until = (seconds) => `in ${duration(seconds)}`;

export function size(bytes) {
  let value = Math.abs(bytes);
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${(unit === "B" || value >= 100 ? whole : tenths).format(value)} ${unit}`;
    value /= 1000;
  }
  return `${tenths.format(value)} TB`;
}
