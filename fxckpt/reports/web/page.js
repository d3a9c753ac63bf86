// The page: one plan and one selection at a time, shown by the graph, the timeline and the panel
// alike.
"use strict";
fx.MOST_FOUND = 60;
fx.MOST_LISTED = 24;

fx.start = async function () {
  const $ = (id) => document.getElementById(id);
  const data = fx.graphOf(await fx.unpack($("data").textContent));
  const model = new fx.Model(data);
  const tree = new fx.Tree(model);
  let plan = null,
    states = null,
    selected = null;

  const graph = new fx.Graph($("graph"), model, tree, {
    select,
    hover,
    plan: () => plan,
    note,
    views: (on) => {
      $("show-views").checked = on;
    },
  });
  const timeline = new fx.Timeline($("timeline"), model, { hover: readout, click: selectTick });

  function setPlan(number) {
    plan = model.plans[number];
    states = model.states(plan);
    $("slider").value = String(number);
    $("plan-title").textContent = plan.title;
    drawFrontier(number);
    graph.paint(states);
    timeline.tick = null;
    timeline.show(plan);
    select(selected);
    readout(null);
  }

  function select(thing) {
    selected = thing;
    timeline.tick = null;
    graph.live([]);
    graph.mark(thing);
    timeline.mark(storagesOf(thing));
    $("panel").innerHTML =
      thing === null ? figures() : typeof thing === "number" ? nodePanel(thing) : groupPanel(thing);
  }

  function storagesOf(thing) {
    if (thing === null || typeof thing !== "number") return [];
    const state = model.storageOf.get(`${model.name(thing)}_rng_state`);
    return state === undefined
      ? model.nodes.storages[thing]
      : [...model.nodes.storages[thing], state];
  }

  // Show a node, unfolding what it is in.
  function go(i) {
    if (tree.groupOf[i] >= 0) graph.reveal(i);
    select(i);
  }

  function selectTick(tick) {
    select(plan.ops[tick] >= 0 ? plan.ops[tick] : null);
    timeline.setTick(tick);
    const live = timeline.live(tick);
    graph.live(live.filter((l) => l.storage >= 0).map((l) => model.nodes.owner[l.storage]));
    if (selected !== null && tree.groupOf[selected] >= 0) {
      const standIn = tree.standIn(selected);
      const element = graph.cy.getElementById(graph.id(standIn));
      if (element.length) graph.cy.animate({ center: { eles: element }, duration: 150 });
    }
    $("panel").innerHTML = tickPanel(tick, live);
  }

  const link = (i, text) => `<a data-node="${i}">${fx.escape(text ?? model.name(i))}</a>`;
  const row = ([name, text]) => `<tr><td>${fx.escape(name)}</td><td>${text}</td></tr>`;
  const rows = (pairs) => `<table>${pairs.map(row).join("")}</table>`;
  const rest = (count) => (count > 0 ? `<p class="rest">and ${count} more</p>` : "");
  const swatch = (fill) => `<i style="background:${fill}"></i>`;
  const bytesCell = (bytes) => `<td class="number">${fx.formatBytes(bytes)}</td>`;
  const list = (found) => {
    if (!found.length) return "<p>none</p>";
    const shown = found
      .slice(0, fx.MOST_LISTED)
      .map((i) => `<li>${link(i)} <span class="rest">${fx.escape(model.module(i))}</span></li>`)
      .join("");
    return `<ul>${shown}</ul>${rest(found.length - fx.MOST_LISTED)}`;
  };

  function figures() {
    const help = [
      "Click a box for what it holds and why, double-click to unfold it, drag to move,",
      "scroll to zoom.",
      "On the timeline, drag to zoom, double-click to reset, click to see what is live.",
    ];
    if (model.plans.length > 1)
      help.unshift("Move the slider, or click a point beside it, for another plan.");
    const about = [...model.about, ...plan.figures].map(([name, text]) => [name, fx.escape(text)]);
    const step = data.step ? fx.stepTable(data.step, data.number) : "";
    const title = `<h2>${data.step ? "This level" : "This plan"}</h2>`;
    return `${step}${title}${rows(about)}<p class="rest">${help.join(" ")}</p>${key()}`;
  }

  // Every colour, line and arrow of the page, with what it means.
  function key() {
    const box = (fill, more = "") =>
      `<rect x="1" y="2" width="24" height="11" rx="2" fill="${fill}" stroke="#5b646d" ${more}/>`;
    const arrow = (color, more = "", head = true) =>
      `<path d="M1 7.5H${head ? 20 : 25}" stroke="${color}" fill="none" ${more}/>` +
      (head ? `<path d="M19 4l6 3.5l-6 3.5z" fill="${color}"/>` : "");
    const stroke = (path, state) =>
      `<path d="${path}" stroke="${fx.STATES[state].color}" stroke-width="3"/>`;
    const bar =
      box("#ffffff", 'stroke-width="1.5"') +
      stroke("M2 11h14", fx.SAVED) +
      stroke("M16 11h8", fx.RECOMPUTED);
    const line = ([drawing, text]) =>
      `<tr><td><svg width="26" height="15" aria-hidden="true">${drawing}</svg></td>` +
      `<td>${fx.escape(text)}</td></tr>`;
    const when = (is, entry) => (is ? [entry] : []);
    const table = (entries) => `<table class="key">${entries.map(line).join("")}</table>`;
    const ofGraph = [
      ...model.shownStates.map((s) => [box(s.color), s.label]),
      [bar, "a folded module; the bar has its bytes by colour"],
      [box("#f4f6f8", 'stroke-opacity="0.5"'), "an unfolded module"],
      [box("#ffffff", 'stroke-dasharray="3 2"'), "a view: no memory of its own"],
      [arrow(fx.COLORS.arrow), "is read by"],
      [arrow(fx.COLORS.arrow, 'stroke-opacity="0.35"', false), "is read by, one of many readers"],
      [
        arrow(fx.STATES[fx.SAVED].color, 'stroke-width="2.5"'),
        "saved for the backward; the wider, the more bytes",
      ],
      [
        arrow(fx.STATES[fx.RECOMPUTED].color, 'stroke-width="2.5" stroke-dasharray="4 3"'),
        "recomputed for the backward",
      ],
      ...when(model.sends, [
        arrow(fx.STATES[fx.AWAY].color, 'stroke-width="2.5" stroke-dasharray="1 3"'),
        "sent away, and fetched for the backward",
      ]),
      [
        box("#ffffff", `style="stroke: ${fx.COLORS.chosen}; stroke-width: 2"`),
        "selected, or its neighbour",
      ],
      [
        box("#ffffff") +
          `<rect width="26" height="15" fill="${fx.COLORS.chosen}" fill-opacity="0.18"/>`,
        "live at the chosen moment",
      ],
    ];
    const ofTimeline = [
      ...model.holders.map((h) => [box(h.color), h.label]),
      [
        box(fx.COLORS.uncheckpointed, `style="stroke: ${fx.COLORS.uncheckpointedLine}"`),
        "uncheckpointed, all values saved",
      ],
      ...when(model.sends, [
        arrow(fx.STATES[fx.AWAY].color, 'stroke-width="2"', false),
        "bytes that are away from the device",
      ]),
      [arrow(fx.COLORS.budget, 'stroke-width="1.5" stroke-dasharray="6 4"', false), "the budget"],
      [
        `<rect x="7" width="12" height="15" fill="${fx.COLORS.chosen}" fill-opacity="0.16"` +
          ` stroke="${fx.COLORS.chosen}"/>`,
        "while the selected value is held",
      ],
      [`<path d="M13 0v15" stroke="#2b3036" stroke-dasharray="2 3"/>`, "end of the forward"],
    ];
    return `<h3>graph</h3>${table(ofGraph)}<h3>timeline</h3>${table(ofTimeline)}`;
  }

  // Extra time against peak, a point for each plan, the one that is shown filled.
  function drawFrontier(number) {
    const width = 150,
      height = 40,
      margin = 6;
    const spread = (values) => {
      const low = Math.min(...values),
        high = Math.max(...values);
      return (v) => (high > low ? (v - low) / (high - low) : 0.5);
    };
    const across = spread(model.plans.map((p) => p.peak)),
      up = spread(model.plans.map((p) => p.slowdown));
    const at = model.plans.map((p) => [
      margin + (width - 2 * margin) * across(p.peak),
      height - margin - (height - 2 * margin) * up(p.slowdown),
    ]);
    const points = at.map(([x, y], k) => {
      const look = k === number ? 'r="4.5" class="current"' : 'r="3" class=""';
      const title = `<title>${fx.escape(model.plans[k].title)}</title>`;
      return `<circle data-plan="${k}" cx="${x}" cy="${y}" ${look}>${title}</circle>`;
    });
    // Levels trade peak for what is held as well: no line joins them.
    const line = data.step ? "" : `<polyline points="${at.map((p) => p.join(",")).join(" ")}"/>`;
    $("frontier").innerHTML =
      "<title>extra time (up) against peak (right) of the plans</title>" +
      `${line}${points.join("")}`;
  }

  function nodePanel(i) {
    const { nodes } = model;
    const state = fx.STATES[states[i]];
    const readers = model.readers(i);
    const again = readers.forward.filter((u) => model.isAgain(u, plan));
    const pairs = [
      ["op", fx.escape(model.op(i))],
      ["value", fx.escape(model.text("type", i))],
      [
        "bytes",
        nodes.bytes[i]
          ? fx.formatBytes(nodes.bytes[i])
          : model.kind(i) === fx.VIEW
            ? "none of its own (a view)"
            : "none of its own",
      ],
    ];
    if (model.kind(i) === fx.OP) {
      const flops = nodes.flops[i] ? `, ${fx.formatFlops(nodes.flops[i])}` : "";
      pairs.push(["one run", fx.formatSeconds(nodes.seconds[i]) + flops]);
    }
    const runs = plan.rows[model.name(i)]?.[1];
    if (runs) pairs.push(["recomputed", runs === 1 ? "once" : `${runs} times`]);
    pairs.push(
      ["module", fx.escape(model.module(i) || "(model)")],
      ["source", fx.escape(model.text("source", i) || "not recorded")],
    );
    const drawn = plan.rows[`${model.name(i)}_rng_state`];
    const why = (color, text) => `<p class="why" style="--tag: ${color}">${fx.escape(text)}</p>`;
    return `<h2>${fx.escape(model.name(i))}</h2>
      ${why(state.color, model.why(i, plan, states[i]))}
      ${drawn ? why(fx.STATES[fx.SAVED].color, `generator state ${drawn[2]}`) : ""}${rows(pairs)}
      <h3>read in the backward by</h3>${list(readers.backward)}
      ${again.length ? `<h3>read by recomputed ops</h3>${list(again)}` : ""}
      <h3>read in the forward by</h3>${list(readers.forward)}
      <h3>made from</h3>${list(nodes.inputs[i])}`;
  }

  function groupPanel(group) {
    const members = tree.members(group);
    const sums = fx.STATES.map(() => [0, 0]);
    for (const i of members) {
      sums[states[i]][0] += 1;
      sums[states[i]][1] += model.nodes.bytes[i];
    }
    const pairs = fx.STATES.map((s, k) => [s.label, sums[k]])
      .filter(([, [count]]) => count)
      .map(([label, [count, bytes]]) => [
        label,
        `${fx.formatBytes(bytes)} in ${count} node${count > 1 ? "s" : ""}`,
      ]);
    const largest = members
      .filter((i) => model.nodes.bytes[i])
      .sort((a, b) => model.nodes.bytes[b] - model.nodes.bytes[a])
      .slice(0, fx.MOST_LISTED);
    const line = (i) => {
      const { color, label } = fx.STATES[states[i]];
      const cells = `<td>${link(i)}</td><td>${swatch(color)}${label}</td>`;
      return `<tr>${cells}${bytesCell(model.nodes.bytes[i])}</tr>`;
    };
    const half = group.isBackward ? "backward" : "forward";
    return `<h2>${fx.escape(group.path || "(model)")}</h2><p>${half}, ${group.nodes} nodes
      · <a data-toggle="${group.id}">${group.isOpen ? "fold" : "unfold"}</a></p>${rows(pairs)}
      <h3>largest values</h3><table>${largest.map(line).join("")}</table>`;
  }

  function tickPanel(tick, live) {
    const op = plan.ops[tick];
    const when =
      tick < plan.forward
        ? "forward"
        : plan.again[tick] === "1"
          ? "recomputed in the backward"
          : "backward";
    const name = (l) =>
      l.storage < 0
        ? "workspace of the kernel"
        : link(model.nodes.owner[l.storage], model.nodes.storage_names[l.storage]);
    const line = (l) => {
      const cells = `<td>${name(l)}</td><td>${model.holders[l.holder].label}</td>`;
      return `<tr>${cells}${bytesCell(l.bytes)}</tr>`;
    };
    const shown = live.filter((l) => l.bytes).slice(0, 2 * fx.MOST_LISTED);
    const where = op >= 0 && model.module(op) ? `, in ${fx.escape(model.module(op))}` : "";
    const before = fx.formatBytes(plan.uncheckpointed[tick]);
    return `<h2>${op >= 0 ? link(op) : "end of the step"}</h2>
      <p>op ${tick + 1} of ${plan.ops.length}, ${when}${where}</p>
      <p><b>${fx.formatBytes(plan.profile[tick])}</b> live; uncheckpointed ${before}</p>
      <h3>live while it runs</h3>
      <table>${shown.map(line).join("")}</table>${rest(live.length - shown.length)}`;
  }

  function readout(tick) {
    if (tick === null) tick = plan.profile.indexOf(Math.max(...plan.profile));
    const op = plan.ops[tick];
    const parts = model.holders
      .map((h, k) => {
        const bytes = timeline.stack[k][tick];
        return bytes ? `${swatch(h.color)}${h.label} ${fx.formatBytes(bytes)}` : "";
      })
      .join("");
    const atPeak = plan.profile[tick] === plan.peak ? " (the peak)" : "";
    const away = plan.away[tick]
      ? `${swatch(fx.STATES[fx.AWAY].color)}away ${fx.formatBytes(plan.away[tick])}`
      : "";
    const during = fx.escape(op >= 0 ? model.name(op) : "the end");
    const again = plan.again[tick] === "1" ? ", again" : "";
    const live = `<b>${fx.formatBytes(plan.profile[tick])}</b>${atPeak}`;
    $("readout").innerHTML = `${live} during ${during}${again}${parts}${away}`;
  }

  function needed(i) {
    const { backward } = model.readers(i);
    if (model.isBackward(i) || !backward.length) return "";
    return `<br>read in the backward by ${fx.escape(
      backward
        .slice(0, 3)
        .map((u) => model.name(u))
        .join(", "),
    )}${backward.length > 3 ? ` and ${backward.length - 3} more` : ""}`;
  }

  function ofNode(i) {
    const bytes = model.nodes.bytes[i] ? fx.formatBytes(model.nodes.bytes[i]) : "";
    const title = `<b>${fx.escape(model.name(i))}</b> ${fx.escape(model.text("type", i))} ${bytes}`;
    return `${title}<br>${fx.escape(model.why(i, plan, states[i]))}${needed(i)}`;
  }

  function ofGroup(group) {
    const title = `<b>${fx.escape(group.path || group.label)}</b>`;
    const act = group.isOpen ? "fold" : "unfold";
    return `${title}<br>${group.nodes} nodes; double-click to ${act}`;
  }

  function hover(thing, place) {
    const box = $("hover");
    box.hidden = thing === null;
    if (thing === null) return;
    box.innerHTML = typeof thing === "number" ? ofNode(thing) : ofGroup(thing);
    const frame = $("graph-box").getBoundingClientRect(),
      inner = $("graph").getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(place.x + 14, frame.width - 430))}px`;
    const below = place.y + inner.top - frame.top + 16;
    box.style.top = `${Math.min(below, frame.height - box.offsetHeight - 6)}px`;
  }

  let noteTimer = 0;
  function note(text) {
    $("note").textContent = text;
    $("note").hidden = false;
    clearTimeout(noteTimer);
    noteTimer = setTimeout(() => {
      $("note").hidden = true;
    }, 4000);
  }

  const names = model.nodes.name.map((name) => name.toLowerCase());
  const texts = model.nodes.texts.map((text) => text.toLowerCase());

  function search(text) {
    const wanted = text.trim().toLowerCase();
    const box = $("found");
    box.hidden = !wanted;
    if (!wanted) return;
    const found = [];
    const scored = (i) => {
      const name = names[i];
      if (name.includes(wanted)) return name === wanted ? 0 : name.startsWith(wanted) ? 1 : 2;
      return matches[model.nodes.module[i]] ||
        matches[model.nodes.op[i]] ||
        matches[model.nodes.source[i]]
        ? 3
        : 4;
    };
    const matches = texts.map((t) => t.includes(wanted));
    for (let i = 0; i < model.count; i++) {
      const score = scored(i);
      if (score < 4) found.push([score, i]);
    }
    found.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    box.innerHTML =
      found
        .slice(0, fx.MOST_FOUND)
        .map(([, i]) => {
          const module = `<small>${fx.escape(model.module(i))}</small>`;
          return `<li data-node="${i}">${fx.escape(model.name(i))} ${module}</li>`;
        })
        .join("") +
      (found.length > fx.MOST_FOUND
        ? `<li><small>and ${found.length - fx.MOST_FOUND} more</small></li>`
        : "") +
      (found.length ? "" : "<li><small>nothing has that name</small></li>");
  }

  const pick = (event) => {
    const node = event.target.closest("[data-node]"),
      fold = event.target.closest("[data-toggle]");
    if (node) {
      go(Number(node.dataset.node));
      $("found").hidden = true;
    }
    const other = event.target.closest("[data-graph]");
    if (other) fx.goToGraph(other.dataset.graph, other.dataset.level);
    if (fold) graph.toggle(tree.groups[Number(fold.dataset.toggle)]);
  };
  $("panel").addEventListener("click", pick);
  $("found").addEventListener("mousedown", pick);
  $("search").addEventListener("input", () => search($("search").value));
  $("search").addEventListener("focus", () => search($("search").value));
  $("search").addEventListener("blur", () => {
    $("found").hidden = true;
  });
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "Escape") $("found").hidden = true;
    const first = $("found").querySelector("[data-node]");
    if (event.key === "Enter" && first && !$("found").hidden) {
      go(Number(first.dataset.node));
      $("found").hidden = true;
    }
  });
  $("slider").max = String(model.plans.length - 1);
  $("slider").disabled = model.plans.length < 2;
  $("frontier").toggleAttribute("hidden", model.plans.length < 2);
  $("frontier").addEventListener("click", (event) => {
    const point = event.target.closest("[data-plan]");
    if (point) setPlan(Number(point.dataset.plan));
  });
  $("about").textContent = model.about
    .filter(([name]) => name !== "model")
    .map(([name, text]) => (name === "device" ? `on ${text}` : text))
    .join(", ");
  $("slider").addEventListener("input", () => setPlan(Number($("slider").value)));
  $("fold").addEventListener("click", () => {
    tree.fold();
    graph.draw();
    graph.fit();
    select(null);
  });
  $("unfold").addEventListener("click", () => {
    if (!tree.unfoldLevel(fx.MOST_SHOWN))
      note(`no room to unfold all of a level: ${fx.MOST_SHOWN} boxes are the most`);
    graph.draw();
    graph.fit();
    select(selected);
  });
  $("fit").addEventListener("click", () => graph.fit());
  $("show-views").addEventListener("change", () => {
    graph.showViews = $("show-views").checked;
    graph.draw();
    select(selected);
  });
  $("show-across").addEventListener("change", () => {
    graph.showAcross = $("show-across").checked;
    graph.draw();
    select(selected);
  });
  $("legend").innerHTML = model.shownStates
    .map((s) => `<span><i style="background:${s.color}"></i>${s.label}</span>`)
    .join("");
  new ResizeObserver(() => {
    graph.cy.resize();
    timeline.resize();
  }).observe(document.body);

  tree.fold();
  tree.unfoldSome(fx.FIRST_SHOWN);
  setPlan(data.chosen);
  graph.draw();
  graph.begin();
  // What a test, or a curious reader's console, holds on to.
  window.fxpage = {
    model,
    tree,
    graph,
    timeline,
    go,
    select,
    setPlan,
    selected: () => selected,
    states: () => states,
  };
  document.body.dataset.ready = "yes";
};
fx.start();
