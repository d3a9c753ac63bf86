// The modules as a tree: two roots, forward and backward; a module's ops and submodules in the
// order of the graph, never too many in one box.
"use strict";
fx.MOST_CHILDREN = 60;
fx.LEAST_BOXED = 4;

fx.Tree = class {
  constructor(model) {
    this.model = model;
    this.groups = [];
    this.places = [];
    this.groupOf = new Array(model.count).fill(-1);
    this.roots = [false, true].map((isBackward) => this.root(isBackward));
  }

  group(label, path, parent, isBackward) {
    const made = {
      id: this.groups.length,
      label,
      path,
      parent,
      isBackward,
      isBox: false,
      children: [],
      first: Infinity,
      nodes: 0,
      isOpen: false,
    };
    this.groups.push(made);
    return made;
  }

  root(isBackward) {
    const { model } = this;
    const root = this.group(isBackward ? "backward" : "forward", "", null, isBackward);
    const byPath = new Map([["", root]]);
    const at = (path) => {
      let found = byPath.get(path);
      if (found === undefined) {
        const cut = path.lastIndexOf(".");
        const parent = at(cut < 0 ? "" : path.slice(0, cut));
        found = this.group(path.slice(cut + 1), path, parent, isBackward);
        byPath.set(path, found);
        parent.children.push(found);
      }
      return found;
    };
    for (let i = 0; i < model.count; i++) {
      if (
        model.isBackward(i) !== isBackward ||
        model.kind(i) === fx.INPUT ||
        model.kind(i) === fx.SIZE
      )
        continue;
      at(this.placeOf(i)).children.push(i);
    }
    this.measure(root);
    this.tidy(root);
    this.own(root);
    return root;
  }

  // The module a node is shown in. What adds up gradients was made by no module: it goes with the
  // last of them.
  placeOf(i) {
    const { model } = this;
    const inputs = model.nodes.inputs[i];
    let place = model.module(i);
    if (
      !place &&
      model.isBackward(i) &&
      inputs.length &&
      inputs.every((from) => model.isBackward(from) && model.kind(from) !== fx.INPUT)
    )
      place = this.places[inputs[inputs.length - 1]] ?? "";
    this.places[i] = place;
    return place;
  }

  // Where a group begins in the graph, and how many nodes are inside.
  measure(group) {
    group.first = Infinity;
    group.nodes = 0;
    for (const child of group.children) {
      if (typeof child === "number") {
        group.first = Math.min(group.first, child);
        group.nodes += 1;
        continue;
      }
      this.measure(child);
      group.first = Math.min(group.first, child.first);
      group.nodes += child.nodes;
    }
  }

  // Join a box with its only box, order children as the graph has them, and put long rows into
  // boxes of their own.
  tidy(group) {
    while (
      group.children.length === 1 &&
      typeof group.children[0] !== "number" &&
      group.parent !== null
    ) {
      const [only] = group.children;
      group.label = `${group.label}.${only.label}`;
      group.path = only.path;
      group.children = only.children;
      only.gone = true;
    }
    const place = (child) => (typeof child === "number" ? child : child.first);
    group.children.sort((a, b) => place(a) - place(b));
    for (const child of group.children)
      if (typeof child !== "number") {
        child.parent = group;
        this.tidy(child);
      }
    if (group.children.some((child) => typeof child !== "number"))
      group.children = this.boxRuns(group);
    if (group.children.length > fx.MOST_CHILDREN) this.split(group);
  }

  split(group) {
    const size = Math.max(
      8,
      Math.min(fx.MOST_CHILDREN, Math.ceil(Math.sqrt(group.children.length))),
    );
    while (group.children.length > fx.MOST_CHILDREN) {
      const boxes = [];
      for (let k = 0; k < group.children.length; k += size)
        boxes.push(this.box(group, group.children.slice(k, k + size)));
      group.children = boxes;
    }
  }

  // Between submodules, ops in a row go into a box: the modules are what one looks for first.
  boxRuns(group) {
    const found = [];
    let run = [];
    const close = () => {
      if (run.length >= fx.LEAST_BOXED) found.push(this.box(group, run));
      else found.push(...run);
      run = [];
    };
    for (const child of group.children) {
      if (typeof child === "number") {
        run.push(child);
        continue;
      }
      close();
      found.push(child);
    }
    close();
    return found;
  }

  box(group, children) {
    const name = (child) =>
      typeof child === "number" ? this.model.name(child) : child.label.split(" … ")[0];
    const last = children[children.length - 1];
    const end = typeof last === "number" ? this.model.name(last) : last.label.split(" … ").pop();
    const made = this.group(`${name(children[0])} … ${end}`, group.path, group, group.isBackward);
    made.children = children;
    made.isBox = true;
    if (children.length > fx.MOST_CHILDREN) this.split(made);
    for (const child of children) if (typeof child !== "number") child.parent = made;
    this.measure(made);
    return made;
  }

  own(group) {
    for (const child of group.children) {
      if (typeof child === "number") this.groupOf[child] = group.id;
      else this.own(child);
    }
  }

  fold() {
    for (const group of this.groups) group.isOpen = false;
    for (const root of this.roots) root.isOpen = true;
  }

  // Unfold all boxes of the least depth that is folded, on both sides, while there is room.
  unfoldLevel(most) {
    const closed = this.visible().filter((v) => typeof v !== "number");
    if (!closed.length) return true;
    const least = Math.min(...closed.map((g) => this.depth(g)));
    let shown = this.visible().length;
    for (const group of closed.filter((g) => this.depth(g) === least)) {
      if (shown + group.children.length > most) return false;
      group.isOpen = true;
      shown += group.children.length;
    }
    return true;
  }

  depth(group) {
    let found = 0;
    for (let parent = group.parent; parent; parent = parent.parent) found += 1;
    return found;
  }

  // Unfold modules from the outside in, while there is room; boxes of ops stay folded.
  unfoldSome(most) {
    for (;;) {
      const shown = this.visible();
      const fits = shown.filter(
        (v) => typeof v !== "number" && !v.isBox && shown.length - 1 + v.children.length <= most,
      );
      const next = fits.sort(
        (a, b) => this.depth(a) - this.depth(b) || b.nodes - a.nodes || a.id - b.id,
      )[0];
      if (next === undefined) return;
      next.isOpen = true;
    }
  }

  // What is drawn: nodes by number, folded boxes as themselves.
  visible() {
    const found = [];
    const walk = (group) => {
      for (const child of group.children) {
        if (typeof child === "number" || !child.isOpen) found.push(child);
        else walk(child);
      }
    };
    for (const root of this.roots)
      if (root.nodes) {
        if (root.isOpen) walk(root);
        else found.push(root);
      }
    return found;
  }

  // The box or node that stands for a node: the outermost folded box it is in.
  standIn(i) {
    let found = i;
    for (let group = this.groups[this.groupOf[i]]; group; group = group.parent)
      if (!group.isOpen) found = group;
    return found;
  }

  reveal(i) {
    for (let group = this.groups[this.groupOf[i]]; group; group = group.parent) group.isOpen = true;
  }

  members(group) {
    const found = [];
    const walk = (g) => {
      for (const child of g.children) {
        if (typeof child === "number") found.push(child);
        else walk(child);
      }
    };
    walk(group);
    return found;
  }
};
