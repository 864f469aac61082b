// Scales: from values to pixels, with ticks that read well at the size at hand.

const TEXT = 12; // pixels
const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** A number as text; `how` is ".2%", ".3f", ".2e", "d" or nothing. */
function format(value, how) {
  if (typeof value !== "number") return String(value);
  const [, digits, form] = /^\.(\d+)([%fe])$/.exec(how || "") || [];
  if (form === "%") return (100 * value).toFixed(digits) + " %";
  if (form === "f") return value.toFixed(digits);
  if (form === "e") return value.toExponential(digits);
  return String(Number.isInteger(value) ? value : Number(value.toPrecision(4)));
}

let ruler = null;

/** Width of a text in pixels. */
function widthOf(text) {
  ruler = ruler || document.createElement("canvas").getContext("2d");
  ruler.font = TEXT + "px system-ui, sans-serif";
  return ruler.measureText(text).width;
}

function shorten(text, room) {
  if (widthOf(text) <= room) return text;
  let kept = text;
  while (kept.length > 1 && widthOf(kept + "…") > room) kept = kept.slice(0, -1);
  return kept + "…";
}

/** 1, 2 or 5 times a power of ten, so that about `count` steps fill the span. */
function niceStep(span, count) {
  const rough = span / Math.max(count, 1);
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  return power * ([1, 2, 5].find((factor) => factor * power >= rough * 0.999) || 10);
}

function linear(axis, [low, high], [from, to], room) {
  const at = (value) => from + ((value - low) / (high - low)) * (to - from);
  let step = niceStep(high - low, Math.abs(to - from) / room);
  if (axis.format === "d") step = Math.max(1, Math.round(step));
  const percent = /%$/.test(axis.format || "");
  const digits = Math.max(0, Math.ceil(-Math.log10(percent ? 100 * step : step) - 1e-9));
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n += 1) {
    ticks.push({ value: n * step, label: format(n * step, "." + digits + (percent ? "%" : "f")) });
  }
  return { at, ticks, invert: (pixel) => low + ((pixel - from) / (to - from)) * (high - low) };
}

function logarithmic(axis, [low, high], [from, to], room) {
  const straight = linear({}, [Math.log10(low), Math.log10(high)], [from, to], room);
  const step = Math.max(1, Math.ceil(((Math.log10(high) - Math.log10(low)) * room) / Math.abs(to - from)));
  const ticks = [];
  for (let n = Math.ceil(Math.log10(low) - 1e-9); n <= Math.log10(high) + 1e-9; n += 1) {
    const power = String(n).replace("-", "⁻").replace(/\d/g, (digit) => SUPERSCRIPT[digit]);
    if (n % step === 0) ticks.push({ value: Math.pow(10, n), label: "10" + power });
  }
  return {
    at: (value) => straight.at(Math.log10(value)),
    ticks,
    invert: (pixel) => Math.pow(10, straight.invert(pixel)),
  };
}

/** One band for each name, in order; names may have several lines. */
function categories(names, [from, to]) {
  const band = (to - from) / Math.max(names.length, 1);
  const places = new Map(names.map((name, place) => [name, from + (place + 0.5) * band]));
  const ticks = names.map((name) => ({ value: name, label: name }));
  return { at: (value) => places.get(value), band: Math.abs(band), ticks };
}

/** The smallest and largest of some numbers, widened; equal ones get room on both sides. */
function range(values, kind, widen) {
  const known = values.filter((value) => Number.isFinite(value) && (kind !== "log" || value > 0));
  if (!known.length) return kind === "log" ? [0.1, 1] : [0, 1];
  const low = known.reduce((a, b) => Math.min(a, b));
  const high = known.reduce((a, b) => Math.max(a, b));
  if (kind === "log") {
    const more = Math.pow(high / low, widen) * (high === low ? 2 : 1);
    return [low / more, high * more];
  }
  const more = high > low ? widen * (high - low) : Math.abs(high) * 0.1 || 0.5;
  return [low - more, high + more];
}
