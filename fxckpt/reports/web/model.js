// The data of the page, unpacked, and what follows from it: who reads what, and how a plan decides
// about each node.
"use strict";
const fx = {};

fx.INPUT = 0;
fx.OP = 1;
fx.PART = 2;
fx.VIEW = 3;
fx.SIZE = 4;
fx.STATES = [
  { key: "saved", label: "saved", color: "#0072b2", text: "#ffffff" },
  { key: "recomputed", label: "recomputed", color: "#e69f00", text: "#222222" },
  { key: "away", label: "sent away", color: "#009e73", text: "#ffffff" },
  { key: "output", label: "output", color: "#56b4e9", text: "#222222" },
  { key: "unneeded", label: "not needed in the backward", color: "#e3e7eb", text: "#2b3036" },
  { key: "gradient", label: "the backward's own", color: "#c9b8d8", text: "#2b3036" },
];
// Of the graph and of the timeline, beside the colours of states and holders.
fx.COLORS = {
  arrow: "#9aa3ab",
  chosen: "#d55e00",
  uncheckpointed: "#f6efe2",
  uncheckpointedLine: "#b08d57",
  budget: "#d55e00",
};
fx.SAVED = 0;
fx.RECOMPUTED = 1;
fx.AWAY = 2;
fx.OUTPUT = 3;
fx.UNNEEDED = 4;
fx.GRADIENT = 5;

fx.unpack = async function (base64) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

fx.formatBytes = function (n) {
  if (Math.abs(n) < 1024) return `${Math.round(n)} B`;
  for (const unit of ["KiB", "MiB", "GiB"]) {
    n /= 1024;
    if (Math.abs(n) < 1024) return `${n.toFixed(1)} ${unit}`;
  }
  return `${(n / 1024).toFixed(1)} TiB`;
};

fx.formatSeconds = (s) =>
  s >= 1
    ? `${s.toFixed(2)} s`
    : s >= 1e-3
      ? `${(s * 1e3).toFixed(2)} ms`
      : `${(s * 1e6).toFixed(1)} us`;

fx.formatFlops = function (n) {
  for (const unit of ["", "K", "M", "G", "T"]) {
    if (n < 1000) return unit ? `${n.toFixed(1)} ${unit}FLOP` : `${n} FLOP`;
    n /= 1000;
  }
  return `${n.toFixed(1)} PFLOP`;
};

fx.escape = (text) =>
  String(text).replace(
    /[&<>"]/g,
    (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c],
  );

fx.Model = class {
  constructor(data) {
    const nodes = data.nodes;
    this.nodes = nodes;
    this.count = nodes.name.length;
    this.plans = data.plans;
    this.holders = data.holders;
    this.about = data.about;
    this.position = new Map(nodes.name.map((name, i) => [name, i]));
    // A generator's state has no node of its own: it goes with the op that draws.
    nodes.storage_names.forEach((name, s) => {
      if (!this.position.has(name)) this.position.set(name, nodes.owner[s]);
    });
    this.users = Array.from({ length: this.count }, () => []);
    nodes.inputs.forEach((inputs, i) => inputs.forEach((from) => this.users[from].push(i)));
    this.storageOf = new Map(nodes.storage_names.map((name, s) => [name, s]));
    // On the way here "last" was counted from "first".
    for (const { held } of this.plans)
      held.first.forEach((first, k) => {
        held.last[k] += first;
      });
  }

  text(column, i) {
    return this.nodes.texts[this.nodes[column][i]];
  }
  name(i) {
    return this.nodes.name[i];
  }
  kind(i) {
    return this.nodes.kind[i];
  }
  module(i) {
    return this.text("module", i);
  }
  op(i) {
    return this.text("op", i);
  }
  isBackward(i) {
    return this.nodes.backward[i] === 1;
  }

  shortOp(i) {
    return (
      this.op(i)
        .split(".")[0]
        .replace(/^_+|_+$/g, "") || this.name(i)
    );
  }

  // The names under which a plan may decide about a node: its own, and those of the storages that
  // it owns or shows.
  decidedAs(i) {
    const names = [this.name(i)];
    for (const s of this.nodes.storages[i])
      if (!names.includes(this.nodes.storage_names[s])) names.push(this.nodes.storage_names[s]);
    return names;
  }

  // One state a node, for one plan.
  states(plan) {
    const outputs = new Set();
    plan.held.storage.forEach((s, k) => {
      if (this.holders[plan.held.holder[k]].name === "output") outputs.add(s);
    });
    const states = new Uint8Array(this.count);
    for (let i = 0; i < this.count; i++) states[i] = this.state(i, plan, outputs);
    return states;
  }

  state(i, plan, outputs) {
    if (this.isBackward(i)) return fx.GRADIENT;
    let best = fx.UNNEEDED;
    for (const name of this.decidedAs(i)) {
      const row = plan.rows[name];
      if (row === undefined) continue;
      if (row[0] === fx.AWAY) return fx.AWAY;
      if (row[0] === fx.SAVED)
        return this.nodes.storages[i].some((s) => outputs.has(s)) ? fx.OUTPUT : fx.SAVED;
      best = fx.RECOMPUTED;
    }
    if (best === fx.UNNEEDED && this.nodes.storages[i].some((s) => outputs.has(s)))
      return fx.OUTPUT;
    if (best === fx.UNNEEDED && this.kind(i) === fx.PART) return this.partState(i, plan);
    return best;
  }

  // The parts of a recomputed op are recomputed with it, where the backward reads them.
  partState(i, plan) {
    const parent = this.nodes.inputs[i][0];
    const row = parent === undefined ? undefined : plan.rows[this.name(parent)];
    return row?.[0] === fx.RECOMPUTED ? fx.RECOMPUTED : fx.UNNEEDED;
  }

  // Why, in words: the plan's own for what it decides about, else what follows.
  why(i, plan, state) {
    for (const name of this.decidedAs(i)) {
      const row = plan.rows[name];
      if (row === undefined) continue;
      return this.kind(i) === fx.VIEW
        ? `a view of ${name}, recomputed for free; ${name} is ${row[2]}`
        : row[2];
    }
    if (this.kind(i) === fx.INPUT) return "an input of the graph: not the step's memory";
    if (this.kind(i) === fx.SIZE) return "a size or scalar: no memory";
    if (this.isBackward(i)) return "made by the backward";
    if (state === fx.OUTPUT)
      return "a forward output, alive to the end; the backward does not read it";
    if (state === fx.RECOMPUTED) return `recomputed with ${this.name(this.nodes.inputs[i][0])}`;
    if (this.kind(i) === fx.VIEW) {
      const use = this.isReadAgain(i, plan)
        ? "recomputed for free where the backward reads it"
        : "the backward does not need it";
      return `a view: no memory of its own; ${use}`;
    }
    return "not needed by the backward: freed after its last read in the forward";
  }

  // Who reads a node's value, through views and parts.
  readers(i) {
    const seen = new Set([i]),
      found = [],
      stack = [...this.users[i]];
    while (stack.length) {
      const user = stack.pop();
      if (seen.has(user)) continue;
      seen.add(user);
      if (this.kind(user) === fx.VIEW || this.kind(user) === fx.PART)
        stack.push(...this.users[user]);
      else found.push(user);
    }
    found.sort((a, b) => a - b);
    return {
      forward: found.filter((u) => !this.isBackward(u)),
      backward: found.filter((u) => this.isBackward(u)),
    };
  }

  // Whether the backward reads a node's value, itself or through what it recomputes.
  isReadAgain(i, plan) {
    const { forward, backward } = this.readers(i);
    return backward.length > 0 || forward.some((u) => this.isAgain(u, plan));
  }

  // Whether a plan recomputes what a node makes.
  isAgain(i, plan) {
    return (plan.rows[this.name(i)]?.[1] ?? 0) > 0;
  }

  // Whether any of the plans sends values away.
  get sends() {
    return this.plans.some((plan) => plan.away.length > 0);
  }

  // The states that a plan of the page may have.
  get shownStates() {
    return fx.STATES.filter((state, k) => k !== fx.AWAY || this.sends);
  }

  bytesHeld(plan, k) {
    const s = plan.held.storage[k];
    return s < 0 ? plan.held.bytes[k] : this.nodes.storage_bytes[s];
  }

  // The positions of the timeline at which a node runs.
  ticks(i, plan) {
    const found = [];
    plan.ops.forEach((op, at) => {
      if (op === i) found.push(at);
    });
    return found;
  }
};
