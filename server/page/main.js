/** The page: reads the form, runs one request at a time, and shows the status. */

import { GONE, Refused, fetchJson, keepKey } from "./api.js";
import { Lane } from "./lane.js";
import { race } from "./race.js";

const EXAMPLES = { text: "Once upon a time", chat: "Why is the sky blue? Answer in three sentences." };
const WORDS = {
  chat: { label: "Message", button: "Send", keys: "Enter sends, Shift+Enter starts a new line, Escape stops.", tokens: 512 },
  text: { label: "Prompt", button: "Generate", keys: "Ctrl+Enter generates, Escape stops.", tokens: 128 },
};
const DEFAULT_TOKENS = Object.values(WORDS).map(({ tokens }) => String(tokens));
const CHECK_AGAIN_MS = 2000;
const SCROLL_MS = 1000;
const SCROLL_KEYS = ["ArrowUp", "ArrowDown", "PageUp", "PageDown", "Home", "End", " "];
const BELOW_END = 48; // points that stay visible below a growing text
const NEEDS_KEY = "needs an API key";
const PHONE = matchMedia("(max-width: 56rem)");
const find = (selector) => document.querySelector(selector);
const form = find("#ask");
let running = null;
let model = null; // as /v1/models describes it
let talk = []; // the conversation so far, as messages
let nextCheck = null; // the timer of the next check of the server
let scrollsUntil = 0; // until then the reader may be scrolling, which scrolling by the page would interrupt

form.addEventListener("submit", (event) => {
  event.preventDefault();
  begin(generate);
});
find("#race").addEventListener("click", () => form.reportValidity() && begin(runRace));
find("#stop").addEventListener("click", () => running?.abort());
find("#api-key").addEventListener("input", (event) => keepKey(event.target.value));
find("#api-key").addEventListener("change", checkServer);
const beginScroll = () => (scrollsUntil = performance.now() + SCROLL_MS); // nothing may move, and then nothing ends
for (const kind of ["wheel", "touchmove"]) addEventListener(kind, beginScroll, { passive: true });
addEventListener("scrollend", () => (scrollsUntil = 0));
const openSettings = (event) => (find(".settings").open ||= find(".settings").contains(event.target));
form.addEventListener("invalid", openSettings, true); // a hidden field can't show its error
document.addEventListener("keydown", (event) => {
  // The keys of an input method; Safari marks the one that ends a composition by its code only.
  if (event.isComposing || event.keyCode === 229) return;
  if (event.key === "Escape") running?.abort();
  if (SCROLL_KEYS.includes(event.key) && !event.target.closest("textarea, input")) beginScroll();
  if (event.key !== "Enter") return;
  const sends = isChat() && event.target === form.prompt && !event.shiftKey;
  if (sends) event.preventDefault();
  if (sends || event.ctrlKey || event.metaKey) form.requestSubmit();
});
find("#anew").addEventListener("click", () => {
  running?.abort();
  talk = [];
  find("#talk").replaceChildren();
  clear();
  showConversing(false);
  showStatus("");
  form.prompt.focus();
});
find("#legend .hint").before(find("#lane").content.querySelector(".timeline .key").cloneNode(true));
find(".settings").open = !PHONE.matches;
checkServer();

/** Shows the server's state, and checks again until it is ready or needs a key. */
async function checkServer() {
  clearTimeout(nextCheck);
  let state = "";
  try {
    const { data } = await fetchJson("v1/models");
    find("#model").textContent = data[0].id;
    find("#key").hidden = !find("#api-key").value;
    adapt(data[0]);
    state = (await fetchJson("ready")).status;
    if (find("#problem").textContent === GONE) showProblem(null);
  } catch (error) {
    state = error.status === 401 ? NEEDS_KEY : error.message;
    if (error.status === 401) find("#key").hidden = false;
    if (!(error instanceof Refused)) throw error;
  } finally {
    find("#server").textContent = state;
    if (!["ready", NEEDS_KEY].includes(state)) nextCheck = setTimeout(checkServer, CHECK_AGAIN_MS);
  }
}

function isChat() {
  return Boolean(model?.chat_template);
}

/** Adapts the page to the model, unless it is the same as before. Only chat models have conversations. */
function adapt(found) {
  if (model?.id === found.id) return;
  model = found;
  const kind = isChat() ? "chat" : "text";
  const words = WORDS[kind];
  if (["", ...Object.values(EXAMPLES)].includes(form.prompt.value)) form.prompt.value = EXAMPLES[kind];
  find("label[for=prompt]").textContent = words.label;
  find("#generate").textContent = words.button;
  find("#shortcuts").textContent = words.keys;
  if (DEFAULT_TOKENS.includes(form.max_tokens.value)) form.max_tokens.value = words.tokens;
}

/** Starts a run, unless another one is active. */
async function begin(run) {
  if (running) return;
  running = new AbortController();
  for (const answer of find("#lanes").querySelectorAll(".answer")) {
    const details = answer.querySelectorAll(":scope > :not(.said), .key"); // earlier answers keep only their text
    for (const part of details) part.remove();
    find("#talk").append(answer);
  }
  clear();
  setBusy(true);
  if (find("#lanes").getBoundingClientRect().top > innerHeight / 2) find("#lanes").scrollIntoView();
  try {
    if (!model) await checkServer(); // after Enter in the key's field
    showStatus(await run(body(), running.signal));
  } catch (error) {
    running.abort(); // so that the server stops too
    if (error.status === 0 || error.status >= 500) checkServer();
    if (error.name === "AbortError") showStatus("Stopped.");
    else showProblem(error);
  } finally {
    setBusy(false);
    running = null;
  }
}

/** Removes what the last run showed. */
function clear() {
  showProblem(null);
  find("#lanes").replaceChildren();
  find("#times").hidden = true;
  find("#times").replaceChildren();
}

async function generate(body, signal) {
  find("#lanes").className = "";
  const lane = new Lane(find("#lanes"), isChat() ? "Answer" : "Text", isChat());
  if (isChat()) await converse(lane, body, signal);
  else await lane.run(body, signal, follow(lane));
  if (lane.model && lane.model !== model?.id) checkServer(); // the server was restarted with another model
  const cut = lane.reason === "length" ? " Cut off at max tokens." : "";
  return `Done: mode ${lane.mode}, seed ${lane.seed}.${cut}`;
}

/** Runs the next turn of the conversation. The message of a turn without an answer returns to the form. */
async function converse(lane, body, signal) {
  const asked = body.messages.at(-1);
  const turn = find("#talk").appendChild(document.createElement("p"));
  turn.className = "turn";
  turn.dir = "auto";
  turn.textContent = asked.content;
  showConversing(true);
  form.prompt.value = "";
  turn.scrollIntoView({ block: "nearest" });
  try {
    await lane.run(body, signal, follow(lane));
  } finally {
    if (lane.tokens.length && turn.isConnected) {
      lane.node.classList.add("answer");
      talk = [...body.messages, { role: "assistant", content: lane.text }];
    } else {
      if (turn.isConnected) form.prompt.value ||= asked.content;
      turn.remove();
      lane.node.remove();
      showConversing(talk.length > 0);
    }
  }
}

function showConversing(is) {
  find("main").classList.toggle("talking", is);
  find("#anew").hidden = !is;
}

/** Keeps the end of a growing text visible, unless the reader has scrolled up or past it. */
function follow(lane) {
  let reached = scrollY;
  scrollsUntil = 0;
  return () => {
    const end = lane.end?.getBoundingClientRect();
    if (!end || performance.now() < scrollsUntil || scrollY < reached || end.top < 0) return;
    const edge = PHONE.matches ? find(".talking .composer")?.getBoundingClientRect().top : innerHeight;
    scrollBy(0, Math.max(end.bottom + BELOW_END - (edge ?? innerHeight), 0)); // scrollIntoView scrolls code sideways, too
    reached = scrollY;
  };
}

async function runRace(body, signal) {
  find("#lanes").className = "side-by-side";
  find("#times").hidden = false;
  return race(body, find("#lanes"), find("#times"), signal, showStatus, isChat());
}

/** Returns the form's fields; empty ones are omitted, so that the server's defaults apply. */
function body() {
  const number = (name) => (form[name].value === "" ? {} : { [name]: Number(form[name].value) });
  return {
    messages: [...(isChat() ? talk : []), { role: "user", content: form.prompt.value }],
    ...number("temperature"),
    ...number("top_p"),
    ...number("max_tokens"),
    ...number("seed"),
    speculation: {
      mode: form.mode.value,
      ...number("num_draft_tokens"),
      ...number("branches"),
      origins: true,
      rounds: true,
    },
  };
}

function setBusy(is) {
  find("#stop").setAttribute("aria-disabled", !is);
  for (const name of ["#generate", "#race"]) find(name).setAttribute("aria-disabled", is);
  if (is) showStatus("Generating…");
}

function showStatus(words) {
  find("#status").textContent = words;
}

function showProblem(error) {
  const place = find("#problem");
  place.hidden = !error;
  place.textContent = error ? error.message : "";
  if (!error) return;
  showStatus("");
  place.scrollIntoView({ block: "nearest" });
  if (error.status === 401) find("#key").hidden = false;
  if (!(error instanceof Refused)) throw error; // an error of the page itself, for the console
}
