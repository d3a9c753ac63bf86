// The step of several graphs: which of them the page shows, and the panel's table of all.
"use strict";

fx.STEP_COLORS = { outside: "#c9d0d6", held: "#0072b2", running: "#e69f00" };

// The graph and the level that the address names, from 0; a page of one graph has neither.
fx.place = function (data) {
  const found = /^#graph=(\d+)(?:&level=(\d+))?$/.exec(location.hash);
  const graph = Math.min(Math.max(Number(found?.[1] ?? 1), 1), data.graphs.length) - 1;
  const count = data.graphs[graph].plans.length;
  const level = Number(found?.[2] ?? 0);
  if (level >= 1 && level <= count) data.graphs[graph].chosen = count - level;
  return graph;
};

fx.goToGraph = function (graph, level) {
  location.hash = `graph=${graph}${level ? `&level=${level}` : ""}`;
  location.reload();
};

// Fill the selector of graphs, and return the data of the one that is shown.
fx.graphOf = function (data) {
  if (!data.graphs) return data;
  const box = document.getElementById("graphs");
  const shown = fx.place(data);
  box.innerHTML = data.names
    .map((name, i) => `<option value="${i + 1}">${fx.escape(name)}</option>`)
    .join("");
  box.value = String(shown + 1);
  box.hidden = false;
  box.addEventListener("change", () => fx.goToGraph(box.value));
  return { ...data.graphs[shown], step: data.step, number: shown + 1 };
};

// The memory of the step, moment by moment, under its budget.
fx.drawMoments = function (step) {
  const width = 300,
    height = 70;
  const sums = step.moments.map((parts) => parts.reduce((a, b) => a + b, 0));
  const most = Math.max(...sums, step.budget ?? 0);
  const wide = width / step.moments.length,
    y = (n) => height - (height * n) / most;
  const colors = Object.values(fx.STEP_COLORS);
  const bars = step.moments.map((parts, k) => {
    let below = 0;
    return parts
      .map((n, part) => {
        const top = below + n;
        const size = `width="${wide}" height="${y(below) - y(top)}"`;
        const bar = `<rect x="${k * wide}" y="${y(top)}" ${size} fill="${colors[part]}"/>`;
        below = top;
        return n ? bar : "";
      })
      .join("");
  });
  const line =
    step.budget === null
      ? ""
      : `<path d="M0 ${y(step.budget)}H${width}" stroke="${fx.COLORS.budget}" ` +
        'stroke-width="1.5" stroke-dasharray="6 4"/>';
  const names = {
    outside: "outside of the graphs",
    held: "held by calls",
    running: "the running call",
  };
  const key = Object.entries(names)
    .map(([name, text]) => `<i style="background:${fx.STEP_COLORS[name]}"></i>${text} `)
    .join("");
  const box = `viewBox="0 -2 ${width} ${height + 2}" preserveAspectRatio="none"`;
  return (
    `<svg class="moments" ${box} role="img">` +
    `<title>memory of the step, moment by moment</title>${bars.join("")}${line}</svg>` +
    `<p class="rest">${key}</p>`
  );
};

fx.stepTable = function (step, number) {
  const isSending = step.rows.some((row) => row.away_bytes);
  const sent = isSending ? ["sent"] : [];
  const head = ["graph", "calls", "level", "held", "peak", ...sent, "recompute"];
  const line = (row) => {
    const peak = Math.max(row.forward_bytes, row.backward_bytes);
    const cells = [
      `<a data-graph="${row.graph}" data-level="${row.level}">` +
        `${row.graph}, ${fx.escape(row.source)}</a>`,
      row.calls,
      `${row.level} of ${row.levels}`,
      fx.formatBytes(row.held_bytes),
      fx.formatBytes(peak),
      ...(isSending ? [fx.formatBytes(row.away_bytes)] : []),
      fx.formatSeconds(row.extra_seconds),
    ];
    const shown = row.graph === number ? ' class="current"' : "";
    const columns = cells.map((cell, i) => `<td${i ? ' class="number"' : ""}>${cell}</td>`);
    return `<tr${shown}>${columns.join("")}</tr>`;
  };
  const rows = step.figures.map(
    ([name, text]) => `<tr><td>${fx.escape(name)}</td><td>${fx.escape(text)}</td></tr>`,
  );
  const titles = head.map((name) => `<th>${name}</th>`).join("");
  return (
    `<h2>The step</h2><table class="calls"><tr>${titles}</tr>${step.rows.map(line).join("")}` +
    `</table>${fx.drawMoments(step)}<table>${rows.join("")}</table>`
  );
};
