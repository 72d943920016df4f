/** Draws a request's rounds on one clock, with a row for the target, each drafter and the orchestrator. */

const SVG = "http://www.w3.org/2000/svg";
const WORDS = {
  prepared: "a prepared branch",
  drafted: "a chain drafted on request",
  head: "a chain drafted by a head",
  copied: "a chain of n-grams, from the text or a table",
};
const LOOKUPS = { hit: "hit", grown: "hit, after waiting for it to grow", late: "miss: its branch came too late", miss: "miss" };
const MARKS = { hit: "hit", grown: "hit", late: "late", miss: "miss" };
const OVERLAYS = { drafted: "stripes", head: "grid", copied: "dots" };
const ROUND_WIDTH = 70;
const BAR = 22;
const ROW = 50;
const LABEL_WIDTH = 9;
const TIME_WIDTH = 64;
const EVERY_MS = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1000 : 120;

export class Timeline {
  constructor(section) {
    this.section = section;
    this.svg = section.querySelector("svg[role=img]");
    this.slider = section.querySelector("input");
    this.words = section.querySelector(".chosen-round");
    this.rounds = [];
    this.drafting = [];
    this.chosen = null; // null: the latest round
    this.waiting = null;
    this.slider.addEventListener("input", () => this.choose(Number(this.slider.value)));
    new ResizeObserver(() => this.draw()).observe(section);
  }

  add(rounds) {
    if (!rounds.length) return;
    this.section.hidden = false;
    this.rounds.push(...rounds);
    this.drafting.push(...rounds.flatMap((round) => round.drafting));
    this.waiting ??= setTimeout(() => this.draw(), EVERY_MS);
  }

  choose(number) {
    this.chosen = number === this.rounds.length - 1 ? null : number;
    this.draw();
  }

  draw() {
    clearTimeout(this.waiting);
    this.waiting = null;
    if (!this.rounds.length || !this.svg.clientWidth) return;
    const at = this.chosen ?? this.rounds.length - 1;
    this.slider.max = this.rounds.length - 1;
    this.slider.value = at;
    this.words.textContent = describe(this.rounds[at], this.rounds.length);
    this.slider.setAttribute("aria-valuetext", this.words.textContent);
    const drawing = new Drawing(this.svg, this.#window(at), this.#drafters());
    drawing.all(this.rounds, this.drafting, this.rounds[at]);
  }

  #drafters() {
    return [...new Set(this.drafting.map((work) => work.drafter))].sort();
  }

  /** Returns the time span to show: the chosen round in the middle, or the latest at the end. */
  #window(at) {
    const first = this.rounds[0].verify;
    const last = this.rounds.at(-1).verify;
    const decoded = end(last) - end(first);
    const shown = Math.max(this.svg.clientWidth / ROUND_WIDTH, 5);
    const length = this.rounds.length > 1 ? (shown * decoded) / (this.rounds.length - 1) : first.ms;
    const until = this.chosen === null ? end(last) : end(this.rounds[at].verify) + length / 2;
    return { from: until - length, length };
  }
}

/** Draws one time span. */
class Drawing {
  constructor(svg, { from, length }, drafters) {
    this.svg = svg;
    this.from = from;
    this.width = svg.clientWidth;
    this.scale = this.width / length;
    this.rows = ["target", ...drafters, "orchestrator"];
    this.height = this.rows.length * ROW + 18;
    svg.replaceChildren();
    svg.setAttribute("height", this.height);
    svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
  }

  all(rounds, drafting, chosen) {
    this.#axis();
    this.#add("rect", { class: "chosen", y: 0, height: this.height - 18, ...this.#across(chosen.verify, 0) });
    this.rows.forEach((name, row) => this.#add("text", { class: "row", x: 0, y: row * ROW + 12 }, name));
    for (const round of rounds.filter((one) => this.#sees(one.verify) || (one.decided && this.#sees(one.decided)))) {
      this.#verify(round);
      this.#decision(round);
    }
    for (const work of drafting.filter((one) => this.#sees(one))) this.#draft(work);
  }

  #verify(round) {
    const from = round.source;
    this.#bar(0, round.verify, from, round.tokens, describe(round));
    if (OVERLAYS[from]) this.#add("rect", { fill: `url(#${OVERLAYS[from]})`, rx: 2, ...this.#box(0, round.verify) });
  }

  #draft(work) {
    const isChain = work.depth && !work.branches;
    const kind = isChain ? "drafted" : "prepared ahead";
    const ahead = work.branches ? `${work.branches} branches, ${work.depth} deep` : "nothing drafted yet";
    const what = isChain ? `a chain of ${work.depth}, on request` : ahead;
    this.#bar(this.rows.indexOf(work.drafter), work, kind, work.depth, `round ${work.round}: ${what}; ${ms(work.ms)}`);
  }

  #decision(round) {
    if (!round.decided) return;
    const row = this.rows.length - 1;
    const y = row * ROW + 20 + BAR / 2;
    if (round.decided.ms > 0) this.#add("rect", { class: "wait", y: y - 3, height: 6, ...this.#across(round.decided, 1) });
    if (!MARKS[round.lookup]) return;
    const mark = this.#add("use", { href: `#mark-${MARKS[round.lookup]}`, x: this.#x(end(round.decided)), y });
    mark.append(createNode("title", {}, describe(round)));
  }

  #bar(row, work, kind, label, title) {
    const box = this.#box(row, work);
    const bar = this.#add("rect", { class: `bar ${kind}`, rx: 2, ...box });
    bar.append(createNode("title", {}, title));
    const width = LABEL_WIDTH * String(label).length;
    const x = box.x + box.width / 2;
    if (box.width < width || x < width || x > this.width - width) return;
    this.#add("text", { class: `label ${kind}`, x, y: box.y + BAR / 2 + 4 }, label);
  }

  #box(row, work) {
    return { y: row * ROW + 20, height: BAR, ...this.#across(work, 1) };
  }

  #across(work, least) {
    return { x: this.#x(work.start_ms), width: Math.max(work.ms * this.scale - 1, least) };
  }

  #axis() {
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((one) => one * this.scale > 70) ?? 10000;
    const last = this.from + this.width / this.scale;
    for (let at = Math.max(Math.ceil(this.from / step) * step, 0); at < last; at += step) {
      const x = this.#x(at);
      this.#add("line", { class: "tick", x1: x, x2: x, y1: 0, y2: this.height - 16 });
      if (x < this.width - TIME_WIDTH) this.#add("text", { class: "time", x: x + 3, y: this.height - 4 }, ms(at, 0));
    }
  }

  #x(at) {
    return (at - this.from) * this.scale;
  }

  #sees(work) {
    return end(work) >= this.from && this.#x(work.start_ms) <= this.width;
  }

  #add(name, attributes, text) {
    const node = createNode(name, attributes, text);
    this.svg.append(node);
    return node;
  }
}

/** Returns a sentence about a round. */
function describe(round, of) {
  const name = `Round ${round.round}${of ? ` of ${of - 1}` : ""}`;
  const chain = WORDS[round.source] ? `${WORDS[round.source]}, ${round.accepted} of ${round.drafted} accepted` : "no chain";
  const lookup = LOOKUPS[round.lookup] ? `${LOOKUPS[round.lookup]}; ` : "";
  const tokens = `${round.tokens} ${round.tokens === 1 ? "token" : "tokens"}`;
  return `${name}: ${lookup}${chain}; ${tokens} in a verify of ${ms(round.verify.ms)}`;
}

function end(work) {
  return work.start_ms + work.ms;
}

function ms(number, digits = 1) {
  return `${number.toFixed(digits)} ms`;
}

function createNode(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
