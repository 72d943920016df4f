/** Shows one answer as it arrives: its figures, its rounds and its text. */

import { chat } from "./api.js";
import { ofRounds, ofTimings, show } from "./figures.js";
import { Painter } from "./painter.js";
import { Timeline } from "./timeline.js";

const EVERY_MS = 50; // each time, the browser lays the whole text out again

export class Lane {
  /** Adds a lane with `title` at the end of `place`. */
  constructor(place, title) {
    const made = document.querySelector("#lane").content.cloneNode(true);
    this.node = made.querySelector(".lane");
    this.node.querySelector("h2").textContent = title;
    this.node.setAttribute("aria-label", title);
    this.list = this.node.querySelector(".figures");
    this.painter = new Painter(this.node.querySelector(".said"));
    this.timeline = new Timeline(this.node.querySelector(".timeline"));
    this.found = ofRounds([]);
    this.text = "";
    this.fresh = []; // tokens that are not shown yet
    this.waiting = null;
    place.append(made);
  }

  /** Sends `body` and shows the answer until it is complete or `signal` stops it; calls `grown` after each change. */
  async run(body, signal, grown) {
    try {
      for await (const event of chat(body, signal)) {
        if (event.progress) this.#reading(event.progress);
        else this.#take(event);
        this.waiting ??= setTimeout(() => this.#show(grown), EVERY_MS);
      }
    } finally {
      this.#wait("");
      this.#show(grown);
    }
    this.painter.close(this.text);
    this.timeline.draw();
  }

  /** The texts of its tokens, in order. */
  get tokens() {
    return this.painter.tokens;
  }

  /** The element of the latest token. */
  get end() {
    return this.painter.place.lastElementChild;
  }

  #reading({ done, total }) {
    this.#wait(`Reading the prompt: ${done} of ${total} tokens.`);
  }

  #wait(words) {
    const place = this.node.querySelector(".waiting");
    place.hidden = !words;
    place.textContent = words;
  }

  #take(event) {
    const [choice] = event.choices;
    if (choice?.speculation) this.#wait("");
    this.text += choice?.delta.content ?? "";
    this.reason = choice?.finish_reason ?? this.reason;
    this.fresh.push(...(choice?.speculation?.origins ?? []));
    this.timeline.add(choice?.speculation?.rounds ?? []);
    this.timings = event.timings ?? this.timings;
    if (event.outrider) this.#ended(event.outrider);
  }

  #show(grown) {
    clearTimeout(this.waiting);
    this.waiting = null;
    this.painter.add(this.fresh.splice(0));
    this.found = this.timings ? ofTimings(this.timings) : ofRounds(this.timeline.rounds);
    show(this.list, this.found);
    grown();
  }

  #ended({ seed, mode, notes }) {
    this.seed = seed;
    this.mode = mode;
    const list = this.node.querySelector(".notes");
    list.hidden = !notes.length;
    for (const words of notes) list.appendChild(document.createElement("li")).textContent = words;
  }
}
