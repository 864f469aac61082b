// What is drawn inside the axes: lines, bars, boxes and heat maps. Each also says what a pointer finds there:
// a list of points {x, y, says} and areas {left, right, top, bottom, says}.

const DASHES = { dash: "8 5", dot: "2 4", dashdot: "8 4 2 4" };

/** Add an SVG element; text is always set as text, never as markup. */
function add(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  Object.keys(attributes).forEach((key) => made.setAttribute(key, attributes[key]));
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

function told(axis, value) {
  return (axis.title ? axis.title + ": " : "") + format(value, axis.hover || axis.format).replace(/\n/g, " ");
}

function drawLine(layer, trace, cell, x, y, found) {
  const shown = (place) =>
    trace.y[place] !== null && trace.x[place] !== null &&
    (cell.y.kind !== "log" || trace.y[place] > 0) && (cell.x.kind !== "log" || trace.x[place] > 0);
  const points = trace.x.map((value, place) => (shown(place) ? [x.at(value), y.at(trace.y[place])] : null));
  let path = "";
  points.forEach((point, place) => {
    if (point) path += (place && points[place - 1] ? "L" : "M") + point.map((n) => n.toFixed(1)).join(" ");
  });
  if (trace.band) {
    add(layer, "path", { d: path + "Z", fill: trace.color, opacity: 0.18, class: "band" });
    return;
  }
  if (trace.lines) {
    const stroke = { d: path, fill: "none", stroke: trace.color, "stroke-width": trace.width || 2, class: "line" };
    add(layer, "path", DASHES[trace.dash] ? { ...stroke, "stroke-dasharray": DASHES[trace.dash] } : stroke);
  }
  points.forEach((point, place) => {
    if (!point) return;
    const colour = trace.colors ? trace.colors[place] : trace.color;
    if (trace.error && trace.error[place]) {
      const ends = [-1, 1].map((sign) => y.at(trace.y[place] + sign * trace.error[place]));
      add(layer, "line", { x1: point[0], x2: point[0], y1: ends[0], y2: ends[1], stroke: colour });
    }
    if (trace.size) add(layer, "circle", { cx: point[0], cy: point[1], r: trace.size / 2, fill: colour, class: "point" });
    const value = trace.said ? trace.said[place] : told(cell.y, trace.y[place]);
    const says = trace.said && !trace.lines ? [trace.name, value] : [trace.name, told(cell.x, trace.x[place]), value];
    found.points.push({ x: point[0], y: point[1], colour, says: says.filter(Boolean) });
  });
}

/** Bars side by side or stacked; `across` are horizontal ones. */
function drawBars(layer, traces, cell, x, y, stacked, found) {
  const across = traces[0].across;
  const [along, up] = across ? [y, x] : [x, y];
  const [names, values] = across ? ["y", "x"] : ["x", "y"];
  const band = along.band || Math.abs(along.at(1) - along.at(0));
  const thick = (0.8 * band) / (stacked ? 1 : traces.length);
  const reached = new Map();
  traces.forEach((trace, number) => {
    trace[names].forEach((name, place) => {
      const value = trace[values][place];
      if (value === null || value === 0) return;
      const from = stacked ? reached.get(name) || 0 : 0;
      reached.set(name, from + value);
      const start = along.at(name) - 0.4 * band + (stacked ? 0 : number * thick);
      const ends = [up.at(from), up.at(from + value)].sort((a, b) => a - b);
      const box = across
        ? { left: ends[0], right: ends[1], top: start, bottom: start + thick }
        : { left: start, right: start + thick, top: ends[0], bottom: ends[1] };
      add(layer, "rect", {
        x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top, fill: trace.color, class: "bar",
      });
      const says = across ? [told(cell.y, name), told(cell.x, value)] : [told(cell.x, name), told(cell.y, value)];
      found.areas.push({ ...box, colour: trace.color, says: [trace.name, ...says] });
    });
  });
}

function quantile(sorted, share) {
  const place = share * (sorted.length - 1);
  const below = Math.floor(place);
  return sorted[below] + (place - below) * ((sorted[below + 1] || sorted[below]) - sorted[below]);
}

/** A lying box from quartile to quartile, whiskers to the last value within 1.5 boxes, and the values. */
function drawBox(layer, trace, cell, x, y, found) {
  const sorted = trace.x.slice().sort((a, b) => a - b);
  const [low, middle, high] = [0.25, 0.5, 0.75].map((share) => quantile(sorted, share));
  const inside = sorted.filter((v) => v >= low - 1.5 * (high - low) && v <= high + 1.5 * (high - low));
  const centre = y.at(trace.name);
  const half = Math.min(0.3 * y.band, 18);
  const line = (x1, y1, x2, y2) => add(layer, "line", { x1, y1, x2, y2, stroke: trace.color, "stroke-width": 1.5 });
  line(x.at(inside[0]), centre, x.at(low), centre);
  line(x.at(high), centre, x.at(inside[inside.length - 1]), centre);
  add(layer, "rect", {
    x: x.at(low), y: centre - half, width: Math.max(x.at(high) - x.at(low), 1), height: 2 * half,
    fill: trace.color, "fill-opacity": 0.25, stroke: trace.color, class: "box",
  });
  line(x.at(middle), centre - half, x.at(middle), centre + half);
  const name = trace.name.replace(/\n/g, " ");
  trace.x.forEach((value, place) => {
    if (!trace.points && inside.includes(value)) return;
    const point = { x: x.at(value), y: centre + half * 0.8 * (((place * 0.618) % 1) * 2 - 1) };
    add(layer, "circle", { cx: point.x, cy: point.y, r: 2.5, fill: trace.color, opacity: 0.6, class: "point" });
    found.points.push({ ...point, colour: trace.color, says: [name, told(cell.x, value)] });
  });
  const says = [["middle", middle], ["lower quartile", low], ["upper quartile", high]];
  found.areas.push({
    left: x.at(low), right: x.at(high), top: centre - half, bottom: centre + half, colour: trace.color,
    says: [name, ...says.map(([what, value]) => what + ": " + format(value, cell.x.hover))],
  });
}

/** The colour at a share of a scale of "#rrggbb". */
function shade(colours, share) {
  const place = Math.min(Math.max(share, 0), 1) * (colours.length - 1);
  const below = Math.min(Math.floor(place), colours.length - 2);
  return [1, 3, 5].map((at) => {
    const [a, b] = [colours[below], colours[below + 1]].map((colour) => parseInt(colour.slice(at, at + 2), 16));
    return Math.round(a + (place - below) * (b - a));
  });
}

/** A pixel for each number, made as large as the axes are. */
function drawHeat(layer, trace, cell, x, y, box, found) {
  const [rows, columns] = [trace.z.length, trace.z[0].length];
  const [low, high] = trace.range;
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const brush = canvas.getContext("2d");
  trace.z.forEach((row, r) => {
    const line = cell.y.reversed ? r : rows - 1 - r;
    row.forEach((value, c) => {
      if (value === null) return;
      brush.fillStyle = "rgb(" + shade(trace.colors, (value - low) / (high - low || 1)).join(",") + ")";
      brush.fillRect(c, line, 1, 1);
    });
  });
  add(layer, "image", {
    x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top,
    preserveAspectRatio: "none", href: canvas.toDataURL(), class: "heat",
  });
  found.under = (px, py) => {
    const c = Math.floor(((px - box.left) / (box.right - box.left)) * columns);
    const line = Math.floor(((py - box.top) / (box.bottom - box.top)) * rows);
    const r = cell.y.reversed ? line : rows - 1 - line;
    if (!(trace.z[r] && c >= 0 && c < columns)) return null;
    const says = [told(cell.x, trace.x[c]), told(cell.y, trace.y[r]), told({ title: trace.title }, trace.z[r][c])];
    return { colour: "rgb(" + shade(trace.colors, (trace.z[r][c] - low) / (high - low || 1)).join(",") + ")", says };
  };
}
