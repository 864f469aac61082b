// A figure: legend, axes, marks, a tip under the pointer, zoom by dragging a mouse. Drawn again when its width changes.

const NARROW = 520; // pixels; below, a figure is less high
const NEAR = 40; // pixels from the pointer to the point it means

function element(parent, name, className, text) {
  const made = document.createElement(name);
  made.className = className;
  if (text) made.textContent = text;
  return parent.appendChild(made);
}

class Figure {
  constructor(host, spec) {
    Object.assign(this, { host, spec, hidden: new Set(), zoom: null, width: 0 });
    this.legend = element(host, "div", "legend");
    this.stage = element(host, "div", "stage");
    this.tip = element(host, "div", "tip");
    this.tip.hidden = true;
    this.traces = [].concat(...spec.cells.map((cell) => cell.traces));
    this.drawLegend();
    this.draw();
    if (window.ResizeObserver) new ResizeObserver(() => this.resized()).observe(host);
    else window.addEventListener("resize", () => this.resized());
    this.listen();
  }

  resized() {
    if (this.host.clientWidth !== this.width) this.draw();
  }

  drawLegend() {
    this.traces.filter((trace) => trace.kind === "heat").slice(0, 1).forEach((trace) => {
      const key = element(this.legend, "span", "scale");
      element(key, "span", "", (trace.title ? trace.title + ": " : "") + format(trace.range[0]));
      element(key, "span", "ramp").style.background = "linear-gradient(to right, " + trace.colors.join(",") + ")";
      element(key, "span", "", format(trace.range[1]));
    });
    if (this.spec.legend) {
      this.traces.filter((trace) => !trace.band).forEach((trace) => {
        const key = element(this.legend, "button", "key");
        key.type = "button";
        key.title = "Hide or show";
        key.setAttribute("aria-pressed", "true");
        const swatch = add(key, "svg", { width: 22, height: 10, "aria-hidden": "true" });
        if (trace.lines) drawLine(swatch, { ...trace, x: [0, 22], y: [5, 5], size: 0, error: null }, { x: {}, y: {} },
          { at: (n) => n }, { at: (n) => n }, { points: [] });
        else add(swatch, "rect", { x: 5, y: 0, width: 12, height: 10, rx: 2, fill: trace.color });
        element(key, "span", "", trace.name.replace(/\n/g, " "));
        key.addEventListener("click", () => {
          if (!this.hidden.delete(trace.group)) this.hidden.add(trace.group);
          key.setAttribute("aria-pressed", String(!this.hidden.has(trace.group)));
          this.draw();
        });
      });
    }
    this.reset = element(this.legend, "button", "key reset", "Show all again");
    this.reset.type = "button";
    this.reset.hidden = true;
    this.reset.addEventListener("click", () => this.zoomTo(null));
  }

  draw() {
    this.width = this.host.clientWidth;
    const least = this.spec.cells.length > 1 ? this.spec.height : 300;
    const height = this.width < NARROW ? Math.max(least, this.spec.height - 100) : this.spec.height;
    this.stage.textContent = "";
    this.tip.hidden = true;
    this.svg = add(this.stage, "svg", {
      width: this.width, height, role: "img", "aria-label": this.host.getAttribute("aria-label") || "",
    });
    const edge = this.spec.cells.length > 1 ? 24 : 0; // for the titles of rows and columns
    const room = { left: 0, right: this.width - edge, top: edge, bottom: height };
    this.found = this.spec.cells.map((cell) => {
      const [x0, x1, y0, y1] = cell.domain;
      return this.drawCell(cell, {
        left: room.left + x0 * (room.right - room.left),
        right: room.left + x1 * (room.right - room.left),
        top: room.bottom - y1 * (room.bottom - room.top),
        bottom: room.bottom - y0 * (room.bottom - room.top),
      });
    });
    this.spec.notes.forEach((note) => {
      const x = note.side ? this.width - 8 : room.left + note.x * (room.right - room.left);
      const y = note.side ? room.bottom - note.y * (room.bottom - room.top) : 14;
      add(this.svg, "text", { x, y, class: "note", "text-anchor": "middle",
        transform: note.side ? "rotate(90 " + x + " " + y + ")" : "" }, note.text);
    });
  }

  drawCell(cell, outer) {
    const traces = cell.traces.filter((trace) => !this.hidden.has(trace.group));
    const names = (way) => [...new Set([].concat(...cell.traces.map((trace) =>
      trace.kind === "box" && way === "y" ? [trace.name] : trace[way])))];
    const rows = cell.y.kind === "category" ? names("y") : null;
    const columns = cell.x.kind === "category" ? names("x") : null;
    const ranges = this.zoom || { x: this.range(cell, traces, "x"), y: this.range(cell, traces, "y") };

    // First the room that labels take, then the scales in what is left.
    const box = { left: outer.left + 1, right: outer.right - 1, top: outer.top + 8, bottom: outer.bottom - 1 };
    box.bottom -= cell.x.title ? 20 : 0;
    box.left += cell.y.title ? 20 : 0;
    const scaleY = () => this.scale(cell.y, rows, ranges.y, cell.y.reversed ? [box.top, box.bottom] : [box.bottom, box.top], 45);
    const scaleX = () => this.scale(cell.x, columns, ranges.x, [box.left, box.right], 55);
    if (cell.y.ticks) {
      const lines = [].concat(...scaleY().ticks.map((tick) => tick.label.split("\n")));
      box.left += Math.min(Math.max(0, ...lines.map(widthOf)) + 8, 0.38 * (outer.right - outer.left));
    }
    const slanted = columns && Math.max(...columns.map(widthOf)) + 6 > (box.right - box.left) / columns.length;
    if (cell.x.ticks) box.bottom -= slanted ? 12 + Math.min(Math.max(...columns.map(widthOf)), 90) : 20;
    if (cell.x.ticks && !columns) box.right -= 14; // half of the last label
    const [x, y] = [scaleX(), scaleY()];

    this.drawAxes(cell, x, y, box, outer, slanted);
    const clip = this.host.id + "-clip-" + this.spec.cells.indexOf(cell);
    add(add(this.svg, "clipPath", { id: clip }), "rect", {
      x: box.left - 3, y: box.top - 3, width: Math.max(box.right - box.left + 6, 0), height: Math.max(box.bottom - box.top + 6, 0),
    });
    const layer = add(this.svg, "g", { class: "marks", "clip-path": "url(#" + clip + ")" });
    const found = { cell, box, x, y, points: [], areas: [], under: null };
    const group = (trace) => add(layer, "g", { class: "trace" });
    const bars = traces.filter((trace) => trace.kind === "bar");
    if (bars.length) drawBars(group(), bars, cell, x, y, this.spec.stack, found);
    traces.forEach((trace) => {
      if (trace.kind === "line") drawLine(group(), trace, cell, x, y, found);
      if (trace.kind === "box") drawBox(group(), trace, cell, x, y, found);
      if (trace.kind === "heat") drawHeat(group(), trace, cell, x, y, box, found);
    });
    return found;
  }

  scale(axis, names, span, pixels, room) {
    if (names) return categories(names, pixels);
    return (axis.kind === "log" ? logarithmic : linear)(axis, span, pixels, room);
  }

  /** From the smallest to the largest value in sight; bars begin at zero and have half a bar of room on both sides. */
  range(cell, traces, way) {
    const kind = cell[way].kind;
    if (kind === "category") return null;
    const heat = traces.find((trace) => trace.kind === "heat");
    if (heat) return [Math.min(...heat[way]) - 0.5, Math.max(...heat[way]) + 0.5];
    const bars = traces.filter((trace) => trace.kind === "bar");
    if (bars.length && (way === "x") === bars[0].across) return [0, this.highest(bars, way) * 1.05 || 1];
    if (bars.length) {
      const places = [].concat(...bars.map((trace) => trace[way]));
      return [Math.min(...places) - 0.6, Math.max(...places) + 0.6];
    }
    const values = [].concat(...traces.map((trace) => trace.error && way === "y"
      ? [].concat(...trace.y.map((v, n) => [v - trace.error[n], v + trace.error[n]])) : trace[way]));
    return range(values, kind, 0.05);
  }

  highest(bars, way) {
    const reached = new Map();
    bars.forEach((trace) => trace[way].forEach((value, place) => {
      const name = trace[way === "x" ? "y" : "x"][place];
      reached.set(name, this.spec.stack ? (reached.get(name) || 0) + (value || 0) : Math.max(reached.get(name) || 0, value || 0));
    }));
    return Math.max(0, ...reached.values());
  }

  drawAxes(cell, x, y, box, outer, slanted) {
    const grid = add(this.svg, "g", { class: "grid" });
    const text = add(this.svg, "g", { class: "labels" });
    if (cell.y.ticks) {
      const every = y.band ? Math.ceil(13 / y.band) : 1; // labels that would touch are left out
      y.ticks.forEach((tick, number) => {
        if (number % every) return;
        const lines = tick.label.split("\n").map((line) => shorten(line, box.left - outer.left - (cell.y.title ? 26 : 6)));
        if (!y.band) add(grid, "line", { x1: box.left, x2: box.right, y1: y.at(tick.value), y2: y.at(tick.value) });
        lines.forEach((line, row) => add(text, "text", {
          x: box.left - 6, y: y.at(tick.value) + 4 + (row - (lines.length - 1) / 2) * 14, "text-anchor": "end", class: "y",
        }, line));
      });
    }
    if (cell.x.ticks) {
      const every = x.band ? Math.ceil(16 / x.band) : 1;
      x.ticks.forEach((tick, number) => {
        const at = x.at(tick.value);
        if (!x.band) add(grid, "line", { x1: at, x2: at, y1: box.top, y2: box.bottom });
        if (slanted && number % every) return;
        const turn = slanted ? "rotate(-90 " + (at + 4) + " " + (box.bottom + 8) + ")" : "";
        add(text, "text", {
          x: slanted ? at + 4 : at, y: box.bottom + (slanted ? 8 : 16), transform: turn, class: "x",
          "text-anchor": slanted ? "end" : "middle",
        }, slanted ? shorten(tick.label, 90) : tick.label);
      });
    }
    const titles = { x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2 };
    if (cell.x.title) add(text, "text", { x: titles.x, y: outer.bottom - 5, "text-anchor": "middle", class: "title" }, cell.x.title);
    if (cell.y.title) add(text, "text", {
      x: outer.left + 12, y: titles.y, "text-anchor": "middle", class: "title",
      transform: "rotate(-90 " + (outer.left + 12) + " " + titles.y + ")",
    }, cell.y.title);
  }

  zoomTo(zoom) {
    this.zoom = zoom;
    this.reset.hidden = !zoom;
    this.draw();
  }

  listen() {
    const where = (event) => {
      const corner = this.svg.getBoundingClientRect();
      return [event.clientX - corner.left, event.clientY - corner.top];
    };
    const zooms = this.spec.cells.length === 1 && this.traces.every((trace) => trace.kind === "line") &&
      ["x", "y"].every((way) => this.spec.cells[0][way].kind !== "category");
    let drag = null;
    this.stage.addEventListener("pointermove", (event) => {
      const [px, py] = where(event);
      if (drag) {
        drag.to = [px, py];
        Object.entries({ x: Math.min(drag.from[0], px), y: Math.min(drag.from[1], py), width: Math.abs(px - drag.from[0]),
          height: Math.abs(py - drag.from[1]) }).forEach(([key, value]) => drag.box.setAttribute(key, value));
      } else this.point(px, py);
    });
    // A finger leaves as soon as it is lifted: what it asked for stays until the next touch.
    this.stage.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.tip.hidden = true; });
    this.stage.addEventListener("pointerdown", (event) => { if (event.pointerType !== "mouse") this.point(...where(event)); });
    document.addEventListener("pointerdown", (event) => { if (!this.host.contains(event.target)) this.tip.hidden = true; });
    if (!zooms) return;
    this.stage.classList.add("zooms");
    this.stage.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button !== 0) return;
      event.preventDefault();
      this.stage.setPointerCapture(event.pointerId);
      this.tip.hidden = true;
      drag = { from: where(event), to: where(event), box: add(this.svg, "rect", { class: "drag" }) };
    });
    this.stage.addEventListener("pointerup", () => {
      if (!drag) return;
      const { from, to, box } = drag;
      const [{ x, y }] = this.found;
      drag = null;
      box.remove();
      if (Math.abs(from[0] - to[0]) < 8 || Math.abs(from[1] - to[1]) < 8) return;
      const between = (scale, a, b) => [a, b].map(scale.invert).sort((one, other) => one - other);
      this.zoomTo({ x: between(x, from[0], to[0]), y: between(y, from[1], to[1]) });
    });
    this.stage.addEventListener("dblclick", () => this.zoomTo(null));
  }

  /** Say what is under the pointer. */
  point(px, py) {
    const near = (a, b) => Math.hypot(a.x - px, a.y - py) - Math.hypot(b.x - px, b.y - py);
    const found = this.found.find(({ box }) => px >= box.left - 6 && px <= box.right + 6 && py >= box.top - 6 && py <= box.bottom + 6);
    if (!found) { this.tip.hidden = true; return; }
    const inSight = found.points.filter(({ x, y }) => x >= found.box.left - 4 && x <= found.box.right + 4 &&
      y >= found.box.top - 4 && y <= found.box.bottom + 4);
    const nearest = inSight.reduce((best, one) => (best && near(best, one) <= 0 ? best : one), null);
    const area = found.areas.find((one) => px >= one.left && px <= one.right && py >= one.top && py <= one.bottom);
    const close = nearest && Math.hypot(nearest.x - px, nearest.y - py) < (area ? 8 : NEAR) ? nearest : null;
    const met = close || area || (found.under && found.under(px, py));
    this.tip.hidden = !met;
    if (!met) return;
    this.tip.textContent = "";
    met.says.forEach((line, number) => element(this.tip, "div", number ? "" : "first", line));
    this.tip.style.borderColor = met.colour;
    const [x, y] = close ? [close.x, close.y] : [px, py];
    const left = x + 14 + this.tip.offsetWidth > this.width ? x - 14 - this.tip.offsetWidth : x + 14;
    this.tip.style.left = Math.max(0, Math.min(left, this.width - this.tip.offsetWidth)) + "px";
    this.tip.style.top = this.stage.offsetTop + Math.max(0, y - this.tip.offsetHeight - 8) + "px";
  }
}

document.querySelectorAll(".plot").forEach((host) => {
  new Figure(host, JSON.parse(host.querySelector("script").textContent));
});
document.getElementById("undrawn").remove();
