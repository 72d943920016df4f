/** The page: what its form asks for, one run at a time, and what it says meanwhile. */

import { Refused, keep, look } from "./api.js";
import { Lane } from "./lane.js";
import { race } from "./race.js";

const EMBEDDED = "outrider-embedded";
const EXAMPLE = "def fibonacci(n):";
const LOOK_AGAIN_MS = 2000;
const find = (selector) => document.querySelector(selector);
const form = find("#ask");
let running = null;

form.addEventListener("submit", (event) => {
  event.preventDefault();
  begin(generate);
});
find("#race").addEventListener("click", () => form.reportValidity() && begin(together));
find("#stop").addEventListener("click", () => running?.abort());
find("#api-key").addEventListener("change", (event) => {
  keep(event.target.value);
  greet();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
greet();

/** Asks what is served here, again until it is ready; and for a key where one is wanted. */
async function greet() {
  try {
    const { status, body } = await look("v1/models");
    find("#key").hidden = status !== 401 && !find("#api-key").value;
    find("#model").textContent = body.data?.[0].id ?? "";
    if (status === 401) {
      find("#server").textContent = "needs an API key";
      return;
    }
    if (body.data[0].id === EMBEDDED && !form.prompt.value) form.prompt.value = EXAMPLE;
    const ready = (await look("ready")).body.status;
    find("#server").textContent = ready;
    if (ready !== "ready") setTimeout(greet, LOOK_AGAIN_MS);
  } catch (error) {
    find("#server").textContent = "unreachable";
    complain(error);
  }
}

/** One run; a second one waits for nobody, it is not begun. */
async function begin(run) {
  if (running) return;
  running = new AbortController();
  complain(null);
  find("#lanes").replaceChildren();
  find("#times").hidden = true;
  find("#times").replaceChildren();
  busy(true);
  if (find("#results").getBoundingClientRect().top > innerHeight / 2) find("#results").scrollIntoView();
  try {
    say(await run(body(), running.signal));
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else complain(error);
  } finally {
    busy(false);
    running = null;
  }
}

async function generate(body, signal) {
  find("#lanes").className = "";
  const lane = new Lane(find("#lanes"), "Answer");
  await lane.run(body, signal);
  return `Done: mode ${lane.mode}, seed ${lane.seed}.`;
}

async function together(body, signal) {
  find("#lanes").className = "side-by-side";
  find("#times").hidden = false;
  return race(body, find("#lanes"), find("#times"), signal, say);
}

/** What the form asks for; what is left empty is left out, and is the server's own. */
function body() {
  const number = (name) => (form[name].value === "" ? {} : { [name]: Number(form[name].value) });
  return {
    messages: [{ role: "user", content: form.prompt.value }],
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

function busy(is) {
  find("#stop").setAttribute("aria-disabled", !is);
  for (const name of ["#generate", "#race"]) find(name).setAttribute("aria-disabled", is);
  if (is) say("Generating…");
}

function say(words) {
  find("#status").textContent = words;
}

function complain(error) {
  const place = find("#problem");
  place.hidden = !error;
  place.textContent = error ? error.message : "";
  if (!error) return;
  say("");
  if (error.status === 401) find("#key").hidden = false;
  if (!(error instanceof Refused)) throw error; // not the server's: for the console
}
