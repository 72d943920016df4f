/** Shows one answer as it arrives: its figures, its rounds and its text. */

import { chat } from "./api.js";
import { ofRounds, ofTimings, show } from "./figures.js";
import { ORIGINS, Painter } from "./painter.js";
import { Timeline } from "./timeline.js";

const EVERY_MS = 50; // between updates, because each makes the browser lay out the text's last blocks
const REST = 3; // and at least so many times as long as an update took: a long line is laid out as a whole
const COPIED_MS = 2000;

export class Lane {
  /** Adds a lane with `title` at the end of `place`; `formatted`: its text is Markdown. */
  constructor(place, title, formatted) {
    const made = document.querySelector("#lane").content.cloneNode(true);
    this.node = made.querySelector(".lane");
    this.node.querySelector("h2").textContent = title;
    this.node.setAttribute("aria-label", title);
    this.list = this.node.querySelector(".figures");
    this.said = this.node.querySelector(".said");
    this.thoughts = this.node.querySelector(".thoughts");
    this.painter = new Painter(this.said.querySelector(".text"), formatted);
    this.thinker = new Painter(this.thoughts.querySelector(".thought"), false);
    this.tokens = []; // their texts, in order
    this.counts = Object.fromEntries(Object.keys(ORIGINS).map((origin) => [origin, 0]));
    this.timeline = new Timeline(this.node.querySelector(".timeline"));
    this.found = ofRounds([]);
    this.text = "";
    this.pending = []; // tokens whose text has not arrived
    this.fresh = []; // tokens that are not shown yet, with their painters
    this.waiting = null;
    this.pause = EVERY_MS;
    this.answers = false;
    place.append(made);
  }

  /** Sends `body` and shows the answer until it is complete or `signal` stops it; calls `grown` after each change. */
  async run(body, signal, grown) {
    try {
      for await (const event of chat(body, signal)) {
        if (event.progress) this.#showProgress(event.progress);
        else this.#handle(event);
        this.waiting ??= setTimeout(() => this.#show(grown), this.pause);
      }
    } finally {
      this.#showWaiting("");
      this.#show(grown);
      this.painter.close(this.text);
      this.timeline.draw();
      if (navigator.clipboard) this.#offerCopy();
    }
  }

  /** The element of the latest token. */
  get end() {
    return this.painter.end ?? this.thinker.end;
  }

  #showProgress({ done, total }) {
    this.#showWaiting(`Reading the prompt: ${done} of ${total} tokens.`);
  }

  #showWaiting(words) {
    const place = this.node.querySelector(".waiting");
    place.hidden = !words;
    place.textContent = words;
  }

  #handle(event) {
    const [choice] = event.choices;
    if (choice?.speculation) this.#showWaiting("");
    this.text += choice?.delta.content ?? "";
    this.reason = choice?.finish_reason ?? this.reason;
    if (choice) this.#collect(choice.delta, choice.speculation?.origins ?? []);
    this.timeline.add(choice?.speculation?.rounds ?? []);
    this.timings = event.timings ?? this.timings;
    this.model = event.model ?? this.model;
    if (event.outrider) this.#showEnd(event.outrider);
  }

  /**
   * Keeps the tokens of an event's text to be shown. Tokens may arrive before their text; what is between the texts of
   * two tokens is a tag, or space that the server strips.
   */
  #collect({ content, reasoning_content: thought }, origins) {
    for (const token of origins) {
      this.tokens.push(token.text);
      this.counts[token.origin] += 1;
      this.pending.push(token);
    }
    const painter = thought === undefined ? this.painter : this.thinker;
    const words = content ?? thought ?? "";
    const all = this.pending.map(({ text }) => text).join("");
    const at = all.indexOf(words);
    const [from, to] = at < 0 ? [0, all.length] : [at, at + words.length];
    for (let place = 0; this.pending.length && (place < to || !this.pending[0].text); ) {
      const { text, ...token } = this.pending.shift();
      const end = place + text.length;
      const shown = all.slice(Math.max(place, from), Math.min(end, to));
      if (shown || !text) this.fresh.push({ painter, token: { ...token, text: shown } });
      if (end > to) this.pending.unshift({ ...token, text: all.slice(to, end), isRest: Boolean(shown) });
      place = end;
    }
  }

  #show(grown) {
    clearTimeout(this.waiting);
    this.waiting = null;
    const began = performance.now();
    const fresh = this.fresh.splice(0);
    for (const painter of [this.thinker, this.painter]) {
      painter.add(fresh.filter((one) => one.painter === painter).map(({ token }) => token));
    }
    this.said.hidden = !this.tokens.length;
    for (const [origin, count] of Object.entries(this.counts)) {
      this.said.querySelector(`[data-count=${origin}]`).textContent = count;
    }
    this.#foldReasoning();
    this.found = this.timings ? ofTimings(this.timings) : ofRounds(this.timeline.rounds);
    show(this.list, this.found);
    grown();
    this.pause = Math.max(EVERY_MS, REST * (performance.now() - began));
  }

  /** Shows reasoning until the answer begins; then it is folded, once: the reader may open it again. */
  #foldReasoning() {
    this.thoughts.hidden = !this.thinker.text;
    if (this.answers || !this.painter.text) return;
    this.answers = true;
    this.thoughts.open = false;
  }

  #offerCopy() {
    const button = this.said.querySelector(".copy");
    button.hidden = !this.text;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(this.text);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
    });
  }

  #showEnd({ seed, mode, notes }) {
    this.seed = seed;
    this.mode = mode;
    const list = this.node.querySelector(".notes");
    list.hidden = !notes.length;
    for (const words of notes) list.appendChild(document.createElement("li")).textContent = words;
  }
}
