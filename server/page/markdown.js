/**
 * Divides Markdown into blocks and runs that together are the whole text, so that each character keeps its token.
 *
 * A block is `{ kind, start, end, level, runs }`, a run `{ start, end, kind }`; places count from the text's beginning.
 * Runs of kind "syntax" are marks and the space between blocks. A block ends where the next one begins, whatever
 * follows, so a growing text changes its last two blocks only: a line's beginning may not show its kind. Tables and HTML
 * stay as they are written.
 */

const FENCE = /^\s*(`{3,}|~{3,})[^`]*$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const STARTS = {
  heading: /^ {0,3}(#{1,6})\s+/,
  item: /^(\s*)([-*+]|\d{1,9}[.)])\s+/,
  quote: /^ {0,3}> ?/,
  table: /^\s*\|/,
};
const CONTINUES = { paragraph: ["paragraph"], item: ["paragraph"], quote: ["quote", "paragraph"], table: ["table"] };
const PLAIN = ["code", "table", "rule"];
const INLINE = new RegExp(
  [
    /(?<!`)(?<ticks>`+)(?!`)(?<code>.+?)(?<!`)\k<ticks>(?!`)/,
    /(?<![\w*])\*{3}(?=[^\s*])(?<both>.+?)(?<=[^\s*])\*{3}(?![\w*])/,
    /(?<![\w*])\*\*(?=[^\s*])(?<strong>.+?)(?<=\S)\*\*(?![\w*])/,
    /(?<!\w)__(?=[^\s_])(?<bold>.+?)(?<=\S)__(?!\w)/,
    /(?<![\w*])\*(?=[^\s*])(?<emphasis>.+?)(?<=[^\s*])\*(?![\w*])/,
    /(?<!\w)_(?=[^\s_])(?<italic>.+?)(?<=[^\s_])_(?!\w)/,
  ]
    .map((form) => form.source)
    .join("|"),
  "gs",
);
const STYLES = { both: "strong emphasis", bold: "strong", italic: "emphasis" };

/** Returns the blocks of a text that begins at `from`. */
export function blocksOf(text, from = 0) {
  const blocks = [];
  let [start, fence, blank] = [from, "", true];
  for (const line of text.match(/[^\n]*\n|[^\n]+$/g) ?? []) {
    const bare = line.trim();
    const last = blocks.at(-1);
    const end = start + line.length;
    if (fence) {
      const closes = bare.startsWith(fence) && !bare.replaceAll(fence[0], "");
      add(last, start, end, closes ? "syntax" : "");
      if (closes) fence = "";
    } else if (!bare) {
      add(last ?? begin(blocks, "paragraph", start), start, end, "syntax");
    } else {
      const kind = kindOf(line.trimEnd());
      const follows = !blank && CONTINUES[last?.kind]?.includes(kind);
      mark(follows ? last : begin(blocks, kind, start), line, start, kind);
      if (kind === "code") fence = FENCE.exec(line.trimEnd())[1];
    }
    blank = !bare;
    start = end;
  }
  for (const block of blocks.filter(({ kind }) => !PLAIN.includes(kind))) {
    block.runs = block.runs.flatMap((run) => (run.kind ? [run] : inline(text.slice(run.start - from, run.end - from), run.start)));
  }
  return blocks;
}

function kindOf(bare) {
  if (FENCE.test(bare)) return "code";
  if (RULE.test(bare)) return "rule";
  return Object.keys(STARTS).find((kind) => STARTS[kind].test(bare)) ?? "paragraph";
}

function begin(blocks, kind, start) {
  blocks.push({ kind, start, end: start, level: 0, runs: [] });
  return blocks.at(-1);
}

/** Adds a line that is not blank, with its mark. */
function mark(block, line, start, kind) {
  const end = start + line.length;
  if (kind === "code" || kind === "rule") return add(block, start, end, "syntax");
  const found = kind === "table" ? null : (STARTS[kind]?.exec(line) ?? (block.kind === "item" ? /^\s*/.exec(line) : null));
  let place = start;
  if (found && kind === "item") {
    block.level = Math.min(Math.floor(found[1].length / 2), 4);
    place = start + found[1].length;
    add(block, start, place, "syntax");
    if (found[2].length === 1) add(block, place, (place += 1), "bullet"); // a number is text
  } else if (found) {
    if (kind === "heading") block.level = found[1].length;
    place = start + found[0].length;
    add(block, start, place, "syntax");
  }
  add(block, place, end, "");
}

/** Adds a run, or lengthens the last one. */
function add(block, start, end, kind) {
  block.end = end;
  const last = block.runs.at(-1);
  if (last?.kind === kind && last.end === start) last.end = end;
  else if (end > start) block.runs.push({ start, end, kind });
}

/** Returns the runs of `text`, which begins at `start` and has the style `kind`. */
function inline(text, start, kind = "") {
  const runs = [];
  let place = 0;
  const push = (end, style) => end > place && runs.push({ start: start + place, end: start + end, kind: style }) && (place = end);
  for (const { 0: whole, index, groups } of text.matchAll(INLINE)) {
    const [name, content] = Object.entries(groups).find(([group, found]) => found && group !== "ticks");
    const style = `${kind} ${STYLES[name] ?? name}`.trim();
    const inner = index + (whole.length - content.length) / 2;
    push(index, kind);
    push(inner, "syntax");
    runs.push(...(name === "code" ? [{ start: start + inner, end: start + inner + content.length, kind: style }] : inline(content, start + inner, style)));
    place = inner + content.length;
    push(index + whole.length, "syntax");
  }
  push(text.length, kind);
  return runs;
}
