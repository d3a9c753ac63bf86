// The graph: what the tree shows, laid out by dagre (the forward downwards, the backward upwards
// beside it) and drawn by cytoscape.
"use strict";
fx.MOST_SHOWN = 800;
fx.FEW_READERS = 4;
fx.FIRST_SHOWN = 56;
fx.GAP = 160;
fx.PADDING = 12;
fx.HEADING = 16;
// Least zoom at which the smallest text of the graph, of 11 pixels, can be read.
fx.READABLE = 0.85;

fx.Graph = class {
  constructor(container, model, tree, on) {
    this.model = model;
    this.tree = tree;
    this.on = on;
    this.showViews = false;
    this.showAcross = true;
    this.selected = null;
    this.cy = cytoscape({
      container,
      elements: [],
      layout: { name: "preset" },
      minZoom: 0.03,
      maxZoom: 4,
      boxSelectionEnabled: false,
      autoungrabify: true,
      pixelRatio: "auto",
      style: this.style(),
    });
    this.cy.on("tap", "node", (event) => this.on.select(this.thing(event.target)));
    this.cy.on("dbltap", "node", (event) => this.toggle(this.thing(event.target)));
    this.cy.on("tap", (event) => {
      if (event.target === this.cy) this.on.select(null);
    });
    this.cy.on("mouseover", "node", (event) =>
      this.on.hover(this.thing(event.target), event.renderedPosition),
    );
    this.cy.on("mouseout", "node", () => this.on.hover(null));
  }

  // A node's number, or a group, for an element.
  thing(element) {
    const id = element.id();
    return id[0] === "n" ? Number(id.slice(1)) : this.tree.groups[Number(id.slice(1))];
  }

  id(thing) {
    return typeof thing === "number" ? `n${thing}` : `g${thing.id}`;
  }

  style() {
    const font = "Helvetica, Arial, sans-serif";
    return [
      {
        selector: "node",
        style: {
          shape: "round-rectangle",
          width: "data(width)",
          height: "data(height)",
          label: "data(label)",
          "font-family": font,
          "font-size": 11,
          "text-valign": "center",
          "text-halign": "center",
          "text-wrap": "wrap",
          color: (e) => e.data("ink") || "#2b3036",
          "border-width": 1,
          "border-color": "#5b646d",
          "background-color": "#ffffff",
          "min-zoomed-font-size": 4.5,
        },
      },
      {
        selector: "node.folded",
        style: {
          "background-image": (e) => e.data("bar") || "none",
          "background-fit": "none",
          "background-clip": "node",
          "background-position-x": 0,
          "background-position-y": "100%",
          "background-width": "100%",
          "background-height": "26%",
          "background-width-relative-to": "include-padding",
          "border-width": 1.5,
          "border-color": "#2b3036",
          "text-margin-y": -5,
          color: "#1b1f23",
        },
      },
      { selector: "node.leaf", style: { "background-color": (e) => e.data("color") || "#fff" } },
      { selector: "node.view", style: { "border-style": "dashed" } },
      {
        selector: "node:parent",
        style: {
          "text-valign": "top",
          "text-halign": "center",
          "background-color": "#f4f6f8",
          "background-opacity": 0.75,
          "border-color": "#b7bec5",
          "border-width": 1,
          padding: 10,
          "font-size": 12,
          color: "#4c555d",
          "text-margin-y": -2,
        },
      },
      {
        selector: "edge",
        style: {
          width: 1.1,
          "line-color": fx.COLORS.arrow,
          "target-arrow-color": fx.COLORS.arrow,
          "target-arrow-shape": "triangle",
          "arrow-scale": 0.7,
          "curve-style": "bezier",
        },
      },
      {
        selector: "edge.across",
        style: {
          width: (e) => e.data("width") || 1,
          "line-color": (e) => e.data("color") || "#999",
          "target-arrow-color": (e) => e.data("color") || "#999",
          "line-style": (e) => e.data("dash") || "solid",
          opacity: 0.55,
          "curve-style": "straight",
        },
      },
      { selector: "edge.minor", style: { opacity: 0.16, "target-arrow-shape": "none" } },
      { selector: "node.near", style: { "border-color": fx.COLORS.chosen, "border-width": 2 } },
      {
        selector: "edge.near",
        style: {
          "line-color": fx.COLORS.chosen,
          "target-arrow-color": fx.COLORS.chosen,
          width: 2,
          opacity: 1,
        },
      },
      { selector: "node.chosen", style: { "border-color": fx.COLORS.chosen, "border-width": 3.5 } },
      {
        selector: "node.live",
        style: { "overlay-color": fx.COLORS.chosen, "overlay-opacity": 0.18, "overlay-padding": 4 },
      },
    ];
  }

  isShown(i) {
    const kind = this.model.kind(i);
    return kind === fx.OP || kind === fx.PART || (kind === fx.VIEW && this.showViews);
  }

  // What a node reads, past what is not shown.
  sources(i) {
    const found = [];
    const stack = [...this.model.nodes.inputs[i]];
    while (stack.length) {
      const from = stack.pop();
      if (this.isShown(from)) found.push(from);
      else if (this.model.kind(from) === fx.VIEW) stack.push(...this.model.nodes.inputs[from]);
    }
    return found;
  }

  // For each group: the outermost folded group around it, or null.
  standIns() {
    const found = new Array(this.tree.groups.length).fill(null);
    const walk = (group, folded) => {
      const here = folded || (group.isOpen ? null : group);
      found[group.id] = here;
      for (const child of group.children) if (typeof child !== "number") walk(child, here);
    };
    for (const root of this.tree.roots) walk(root, null);
    return found;
  }

  draw() {
    const { model, tree } = this;
    const standIns = this.standIns();
    const standIn = (i) => standIns[tree.groupOf[i]] ?? i;
    const shown = tree.visible().filter((v) => typeof v !== "number" || this.isShown(v));
    const edges = new Map();
    for (let i = 0; i < model.count; i++) {
      if (tree.groupOf[i] < 0 || !this.isShown(i)) continue;
      const to = standIn(i);
      for (const from of this.sources(i)) {
        if (tree.groupOf[from] < 0) continue;
        const a = standIn(from);
        if (a === to) continue;
        const key = `${this.id(a)}>${this.id(to)}`;
        const edge = edges.get(key) ?? {
          id: key,
          source: this.id(a),
          target: this.id(to),
          from: new Set(),
          isAcross: model.isBackward(from) !== model.isBackward(i),
        };
        edge.from.add(from);
        edges.set(key, edge);
      }
    }
    const elements = [];
    const open = new Set();
    for (const thing of shown) {
      const size = this.size(thing);
      const isGroup = typeof thing !== "number";
      const parent = isGroup ? thing.parent : tree.groups[tree.groupOf[thing]];
      for (let g = parent; g; g = g.parent) open.add(g);
      elements.push({
        group: "nodes",
        data: {
          id: this.id(thing),
          label: this.label(thing),
          parent: parent ? this.id(parent) : undefined,
          ...size,
        },
        classes: isGroup ? "folded" : model.kind(thing) === fx.VIEW ? "leaf view" : "leaf",
      });
    }
    const places = this.places(shown, open, edges);
    for (const g of open)
      elements.push({
        group: "nodes",
        data: {
          id: this.id(g),
          label: g.label,
          parent: g.parent ? this.id(g.parent) : undefined,
          width: 1,
          height: 1,
        },
      });
    for (const element of elements) {
      const place = places.get(element.data.id);
      if (place) element.position = place;
    }
    const leading = new Set(this.leading([...edges.values()].filter((edge) => !edge.isAcross)));
    for (const edge of edges.values()) {
      if (edge.isAcross && !this.showAcross) continue;
      const look = edge.isAcross ? "across" : leading.has(edge) ? "" : "minor";
      elements.push({
        group: "edges",
        data: { id: edge.id, source: edge.source, target: edge.target, from: [...edge.from] },
        classes: look,
      });
    }
    this.cy.startBatch();
    this.cy.elements().remove();
    this.cy.add(elements);
    this.cy.endBatch();
    this.paint();
  }

  label(thing) {
    if (typeof thing === "number")
      return this.model.kind(thing) === fx.PART
        ? this.model.name(thing)
        : this.model.shortOp(thing);
    return `${thing.label}\n${thing.nodes} nodes`;
  }

  size(thing) {
    const longest = Math.max(
      ...this.label(thing)
        .split("\n")
        .map((line) => line.length),
    );
    return { width: Math.max(54, 6.6 * longest + 16), height: typeof thing === "number" ? 22 : 46 };
  }

  // Both halves side by side: the forward runs down, the backward up, the loss at the foot of both.
  // Each open box is laid out by dagre on its own, with the boxes in it as single nodes, so that
  // the time grows with what is shown and not with its square.
  places(shown, open, edges) {
    const { tree } = this;
    const parent = (thing) =>
      typeof thing === "number" ? tree.groups[tree.groupOf[thing]] : thing.parent;
    const thingOf = (id) =>
      id[0] === "n" ? Number(id.slice(1)) : tree.groups[Number(id.slice(1))];
    const path = (thing) => {
      const found = [thing];
      for (let g = parent(thing); g; g = g.parent) found.push(g);
      return found.reverse();
    };
    const inside = new Map([...open].map((g) => [g, { children: [], edges: new Map() }]));
    for (const thing of [...shown, ...open]) {
      const g = parent(thing);
      if (g) inside.get(g).children.push(thing);
    }
    for (const edge of edges.values()) {
      if (edge.isAcross) continue;
      const a = path(thingOf(edge.source)),
        b = path(thingOf(edge.target));
      let k = 0;
      while (a[k + 1] !== undefined && a[k + 1] === b[k + 1]) k += 1;
      if (!inside.has(a[k])) continue;
      const source = this.id(a[k + 1]),
        target = this.id(b[k + 1]);
      inside.get(a[k]).edges.set(`${source}>${target}`, { source, target });
    }
    const found = new Map();
    let left = 0;
    const boxes = [];
    for (const root of tree.roots) {
      if (!root.nodes) continue;
      const made = open.has(root)
        ? this.laidOut(root, inside)
        : {
            ...this.size(root),
            at: [[root, this.size(root).width / 2, this.size(root).height / 2]],
          };
      boxes.push({ made, left });
      left += made.width + fx.GAP;
    }
    const foot = Math.max(...boxes.map(({ made }) => made.height));
    for (const box of boxes)
      for (const [thing, x, y] of box.made.at)
        found.set(this.id(thing), { x: x + box.left, y: y + foot - box.made.height });
    return found;
  }

  // The size of an open box, and where the folded boxes and nodes are in it.
  laidOut(group, inside) {
    const { children, edges } = inside.get(group);
    const graph = new dagre.graphlib.Graph()
      .setGraph({ rankdir: group.isBackward ? "BT" : "TB", nodesep: 16, ranksep: 24 })
      .setDefaultEdgeLabel(() => ({}));
    const parts = new Map();
    const place = (thing) => (typeof thing === "number" ? thing : thing.first);
    for (const child of children.slice().sort((a, b) => place(a) - place(b))) {
      const part = inside.has(child) ? this.laidOut(child, inside) : this.size(child);
      parts.set(this.id(child), { child, ...part });
      graph.setNode(this.id(child), { width: part.width, height: part.height });
    }
    for (const edge of this.leading([...edges.values()])) graph.setEdge(edge.source, edge.target);
    dagre.layout(graph);
    const { width, height } = graph.graph();
    const at = [];
    for (const [id, part] of parts) {
      const node = graph.node(id);
      const x = node.x + fx.PADDING,
        y = node.y + fx.PADDING + fx.HEADING;
      if (part.at === undefined) at.push([part.child, x, y]);
      else
        for (const [thing, dx, dy] of part.at)
          at.push([thing, x - part.width / 2 + dx, y - part.height / 2 + dy]);
    }
    return { width: width + 2 * fx.PADDING, height: height + 2 * fx.PADDING + fx.HEADING, at };
  }

  // The edges that say where things go. A value that everybody reads (a mask) would draw an edge
  // past every layer, each of which dagre fills with a dummy a rank: of those only the first
  // counts, and the one from a reader's latest input.
  leading(edges) {
    const place = (id) =>
      id[0] === "n" ? Number(id.slice(1)) : this.tree.groups[Number(id.slice(1))].first;
    const out = new Map(),
      latest = new Map();
    for (const edge of edges) {
      out.set(edge.source, (out.get(edge.source) ?? 0) + 1);
      if (!latest.has(edge.target) || place(edge.source) > place(latest.get(edge.target)))
        latest.set(edge.target, edge.source);
    }
    const seen = new Set();
    return edges.filter((edge) => {
      const isFirst = !seen.has(edge.source);
      seen.add(edge.source);
      return (
        isFirst || out.get(edge.source) <= fx.FEW_READERS || latest.get(edge.target) === edge.source
      );
    });
  }

  // Colours for a plan; nothing moves.
  paint(states = this.states) {
    this.states = states;
    if (!states) return;
    const { model, tree } = this;
    this.cy.startBatch();
    this.cy.nodes(".leaf").forEach((element) => {
      const state = fx.STATES[states[this.thing(element)]];
      element.data({ color: state.color, ink: state.text });
    });
    this.cy
      .nodes(".folded")
      .forEach((element) => element.data(this.shares(tree.members(this.thing(element)))));
    const plan = this.on.plan();
    const most = Math.max(1, plan.peak);
    this.cy.edges(".across").forEach((element) => {
      const bytes = [0, 0, 0];
      for (const i of element.data("from")) {
        const state = states[i];
        const kind = state === fx.RECOMPUTED || state === fx.AWAY ? state : fx.SAVED;
        bytes[kind] += Math.max(1, model.nodes.bytes[i]);
      }
      const largest = bytes.indexOf(Math.max(...bytes));
      element.data({
        color: fx.STATES[largest].color,
        dash: ["solid", "dashed", "dotted"][largest],
        width: 1 + 7 * Math.sqrt(Math.min(1, (bytes[0] + bytes[1] + bytes[2]) / most)),
      });
    });
    this.cy.endBatch();
  }

  // A folded box as a bar: bytes by state.
  shares(members) {
    const sums = fx.STATES.map(() => 0),
      counts = fx.STATES.map(() => 0);
    for (const i of members) {
      sums[this.states[i]] += this.model.nodes.bytes[i];
      counts[this.states[i]] += 1;
    }
    const weights = sums.some((n) => n > 0) ? sums : counts;
    const total = weights.reduce((a, b) => a + b, 0);
    let at = 0;
    const parts = weights.map((weight, k) => {
      const place = `x="${(100 * at) / total}" y="0" width="${(100 * weight) / total}" height="10"`;
      const part = weight ? `<rect ${place} fill="${fx.STATES[k].color}"/>` : "";
      at += weight;
      return part;
    });
    const svg =
      '<svg xmlns="http://www.w3.org/2000/svg" width="100" height="10" viewBox="0 0 100 10"' +
      ` preserveAspectRatio="none">${parts.join("")}</svg>`;
    return { bar: `data:image/svg+xml,${encodeURIComponent(svg)}` };
  }

  toggle(thing) {
    if (typeof thing === "number") return;
    if (!thing.isOpen && this.tree.visible().length + thing.children.length > fx.MOST_SHOWN) {
      this.on.note(`${fx.MOST_SHOWN} boxes are the most that are shown at once: fold some first`);
      return;
    }
    thing.isOpen = !thing.isOpen;
    this.draw();
    this.look(thing);
    this.on.select(thing);
  }

  // Bring a node or group into sight.
  look(thing) {
    const element = this.cy.getElementById(this.id(thing));
    if (!element.length) return;
    const box = element.boundingBox();
    const zoom = Math.min(1.2, (0.85 * this.cy.width()) / box.w, (0.85 * this.cy.height()) / box.h);
    this.cy.zoom(Math.max(zoom, this.cy.minZoom()));
    this.cy.center(element);
  }

  reveal(i) {
    this.tree.reveal(i);
    if (!this.isShown(i) && this.model.kind(i) === fx.VIEW) {
      this.showViews = true;
      this.on.views(true);
    }
    this.draw();
    this.look(i);
  }

  mark(thing) {
    this.cy.elements(".chosen, .near").removeClass("chosen near");
    if (thing === null) return;
    const element = this.cy.getElementById(this.id(thing));
    element.addClass("chosen");
    if (!element.isParent())
      element.connectedEdges().addClass("near").connectedNodes().not(element).addClass("near");
  }

  // Overlay what is live at a moment.
  live(nodes) {
    this.cy.startBatch();
    this.cy.nodes(".live").removeClass("live");
    const standIns = this.standIns();
    for (const i of nodes) {
      if (this.tree.groupOf[i] < 0) continue;
      this.cy.getElementById(this.id(standIns[this.tree.groupOf[i]] ?? i)).addClass("live");
    }
    this.cy.endBatch();
  }

  fit() {
    this.cy.fit(undefined, 30);
  }

  // The first sight: everything if its text can be read, else the foot, where the loss is and the
  // peak mostly.
  begin() {
    this.fit();
    if (this.cy.zoom() >= fx.READABLE) return;
    const { x1, x2, y2 } = this.cy.elements().boundingBox();
    const width = this.cy.width(),
      wanted = fx.READABLE * (x2 - x1);
    this.cy.zoom(fx.READABLE);
    this.cy.pan({
      x: (wanted < width ? (width - wanted) / 2 : 10) - fx.READABLE * x1,
      y: this.cy.height() - 14 - fx.READABLE * y2,
    });
  }
};
