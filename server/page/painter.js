/** A text that grows, each token marked by where it came from and counted. Knows tokens; knows no rounds. */

export const ORIGINS = {
  prepared: "from a prepared branch",
  drafted: "drafted just in time",
  head: "drafted by a head",
  copied: "copied from the text",
  guessed: "beside a drafted chain",
  target: "the target’s own",
};

/** Is not marked: a line under an empty stretch says nothing. */
const INDENTATION = /^(\s*\n\s*|\s{2,})/;

export class Painter {
  /** `section` has a place for the text and one for each count. */
  constructor(section) {
    this.section = section;
    this.place = section.querySelector(".text");
    this.counts = Object.fromEntries(Object.keys(ORIGINS).map((origin) => [origin, 0]));
    this.tokens = [];
  }

  /** Tokens as the API tells them; one that completes no character is counted all the same. */
  add(tokens) {
    if (!tokens.length) return;
    this.section.hidden = false;
    const grown = document.createDocumentFragment();
    for (const { text, origin } of tokens) {
      const token = document.createElement("span");
      token.className = `token ${origin}`;
      token.title = ORIGINS[origin];
      const bare = INDENTATION.exec(text)?.[0] ?? "";
      const marked = document.createElement("u");
      marked.textContent = text.slice(bare.length);
      token.append(bare, marked);
      grown.append(token);
      this.tokens.push(text);
      this.counts[origin] += 1;
    }
    this.place.append(grown);
    for (const [origin, count] of Object.entries(this.counts)) {
      this.section.querySelector(`[data-count=${origin}]`).textContent = count;
    }
  }

  /** What was held back to the end and belongs to no token, such as a character that was cut off. */
  close(whole) {
    const told = this.tokens.join("");
    if (whole.length > told.length && whole.startsWith(told)) this.place.append(whole.slice(told.length));
  }
}
