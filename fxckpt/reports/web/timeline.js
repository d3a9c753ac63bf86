// The memory timeline: live bytes by what holds them, the budget, the uncheckpointed profile; drawn
// by uPlot.
"use strict";
fx.Timeline = class {
  constructor(container, model, on) {
    this.container = container;
    this.model = model;
    this.on = on;
    this.bands = [];
    this.tick = null;
  }

  // Live bytes by holder at every op of a plan.
  static stack(model, plan) {
    const length = plan.ops.length;
    const stack = model.holders.map(() => new Float64Array(length + 1));
    const { holder, first, last } = plan.held;
    for (let k = 0; k < first.length; k++) {
      const bytes = model.bytesHeld(plan, k);
      stack[holder[k]][first[k]] += bytes;
      stack[holder[k]][last[k] + 1] -= bytes;
    }
    for (const row of stack) for (let at = 1; at <= length; at++) row[at] += row[at - 1];
    return stack.map((row) => row.subarray(0, length));
  }

  show(plan) {
    this.plan = plan;
    this.stack = fx.Timeline.stack(this.model, plan);
    const length = plan.ops.length;
    const sums = [];
    let below = new Float64Array(length);
    for (const row of this.stack) {
      below = below.map((n, at) => n + row[at]);
      sums.push(below);
    }
    const x = Float64Array.from({ length: length + 1 }, (_, at) => at);
    // The last op is as wide as the others.
    const close = (row) => [...row, row[row.length - 1]];
    const data = [x, close(plan.uncheckpointed), ...sums.slice().reverse().map(close)];
    if (plan.away.length) data.push(close(plan.away));
    const top =
      1.2 *
      Math.max(
        plan.budget && plan.budget < 3 * plan.peak ? plan.budget : 0,
        ...plan.profile,
        ...plan.away,
        ...plan.uncheckpointed,
      );
    const stepped = uPlot.paths.stepped({ align: 1 });
    const holders = this.model.holders.slice().reverse();
    const series = [
      {},
      {
        label: "uncheckpointed",
        stroke: fx.COLORS.uncheckpointedLine,
        width: 1,
        fill: fx.COLORS.uncheckpointed,
        paths: stepped,
        points: { show: false },
      },
      ...holders.map((h) => ({
        label: h.label,
        stroke: h.color,
        width: 0,
        fill: h.color,
        paths: stepped,
        points: { show: false },
      })),
    ];
    if (plan.away.length)
      series.push({
        label: "away",
        stroke: fx.STATES[fx.AWAY].color,
        width: 2,
        paths: stepped,
        points: { show: false },
      });
    if (this.plot) this.plot.destroy();
    this.plot = new uPlot(
      {
        width: this.width(),
        height: this.height(),
        legend: { show: false },
        cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
        scales: {
          x: { time: false, range: (u, min, max) => [Math.max(0, min), Math.min(length, max)] },
          y: { range: () => [0, top] },
        },
        axes: [
          {
            label: "ops of the step, in order",
            labelSize: 18,
            size: 28,
            font: "11px system-ui, sans-serif",
            labelFont: "11px system-ui, sans-serif",
            stroke: "#4c555d",
            grid: { show: false },
          },
          {
            values: (u, ticks) => ticks.map(fx.formatBytes),
            splits: () => fx.Timeline.splits(top),
            size: 74,
            font: "11px system-ui, sans-serif",
            stroke: "#4c555d",
            grid: { stroke: "#e9ecef" },
          },
        ],
        series,
        hooks: {
          draw: [(u) => this.overlay(u)],
          setCursor: [
            (u) => this.on.hover(u.cursor.idx === null || u.cursor.left < 0 ? null : this.at(u)),
          ],
          ready: [(u) => this.listen(u)],
        },
      },
      data,
      this.container,
    );
  }

  static splits(top) {
    let unit = 1;
    while (top / (unit * 1024) >= 1) unit *= 1024;
    const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500].map((n) => n * unit);
    const step = steps.find((n) => top / n <= 5) ?? 500 * unit;
    return Array.from({ length: Math.floor(top / step) + 1 }, (_, k) => k * step);
  }

  at(u) {
    return Math.min(
      this.plan.ops.length - 1,
      Math.max(0, Math.floor(u.posToVal(u.cursor.left, "x"))),
    );
  }

  // A click is a press that does not move: a drag zooms.
  listen(u) {
    let from = 0;
    u.over.addEventListener("mousedown", (event) => {
      from = event.clientX;
    });
    u.over.addEventListener("mouseup", (event) => {
      if (Math.abs(event.clientX - from) < 3) this.on.click(this.at(u));
    });
    u.over.addEventListener("mouseleave", () => this.on.hover(null));
  }

  overlay(u) {
    const { ctx, bbox } = u;
    const x = (v) => u.valToPos(v, "x", true),
      y = (v) => u.valToPos(v, "y", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = `${fx.COLORS.chosen}29`;
    ctx.strokeStyle = fx.COLORS.chosen;
    ctx.lineWidth = devicePixelRatio;
    for (const [first, last] of this.bands) {
      const left = x(first),
        width = Math.max(2 * devicePixelRatio, x(last + 1) - x(first));
      ctx.fillRect(left, bbox.top, width, bbox.height);
      ctx.strokeRect(left, bbox.top + 1, width, bbox.height - 2);
    }
    const line = (draw, dash, color, width) => {
      ctx.beginPath();
      ctx.setLineDash(dash.map((n) => n * devicePixelRatio));
      ctx.strokeStyle = color;
      ctx.lineWidth = width * devicePixelRatio;
      draw();
      ctx.stroke();
    };
    const split = x(this.plan.forward);
    line(
      () => {
        ctx.moveTo(split, bbox.top);
        ctx.lineTo(split, bbox.top + bbox.height);
      },
      [2, 3],
      "#2b3036",
      1,
    );
    ctx.fillStyle = "#2b3036";
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "top";
    ctx.textAlign = "right";
    ctx.fillText("forward ", split, bbox.top + 3 * devicePixelRatio);
    ctx.textAlign = "left";
    ctx.fillText(" backward", split, bbox.top + 3 * devicePixelRatio);
    if (this.plan.budget) {
      const level = y(this.plan.budget);
      line(
        () => {
          ctx.moveTo(bbox.left, level);
          ctx.lineTo(bbox.left + bbox.width, level);
        },
        [6, 4],
        fx.COLORS.budget,
        1.5,
      );
      ctx.fillStyle = "#a34700";
      ctx.textAlign = "right";
      ctx.textBaseline = "bottom";
      ctx.fillText("budget ", bbox.left + bbox.width, level - 2 * devicePixelRatio);
    }
    if (this.tick !== null)
      line(
        () => {
          ctx.moveTo(x(this.tick + 0.5), bbox.top);
          ctx.lineTo(x(this.tick + 0.5), bbox.top + bbox.height);
        },
        [],
        fx.COLORS.chosen,
        1.5,
      );
    ctx.restore();
  }

  // Mark the intervals in which storages are held.
  mark(storages) {
    const { held } = this.plan;
    const wanted = new Set(storages);
    this.bands = [];
    if (wanted.size)
      held.storage.forEach((s, k) => {
        if (wanted.has(s)) this.bands.push([held.first[k], held.last[k]]);
      });
    if (this.plot) this.plot.redraw(false);
  }

  setTick(tick) {
    this.tick = tick;
    if (this.plot) this.plot.redraw(false);
  }

  // What is live at a moment, the largest first.
  live(tick) {
    const { held } = this.plan;
    const found = [];
    for (let k = 0; k < held.first.length; k++)
      if (held.first[k] <= tick && tick <= held.last[k])
        found.push({
          storage: held.storage[k],
          holder: held.holder[k],
          bytes: this.model.bytesHeld(this.plan, k),
        });
    return found.sort((a, b) => b.bytes - a.bytes);
  }

  width() {
    return Math.max(200, this.container.parentElement.clientWidth - 24);
  }
  height() {
    return Math.max(90, this.container.parentElement.clientHeight - 26);
  }
  resize() {
    if (this.plot) this.plot.setSize({ width: this.width(), height: this.height() });
  }
};
