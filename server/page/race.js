/** Runs AR, then SSD, with one seed, and compares their texts and speeds. */

import { seconds } from "./figures.js";
import { Lane } from "./lane.js";

const RUNS = [
  { mode: "ar", title: "AR: the target alone" },
  { mode: "ssd", title: "SSD: drafting during the verify" },
];

/** Runs both in `place`, one after the other, with `bars` of their times. Returns a sentence with the result. */
export async function race(body, place, bars, signal, showStatus, formatted) {
  const lanes = RUNS.map((one) => new Lane(place, one.title, formatted));
  const draw = addBars(bars, lanes);
  let seed = body.seed;
  for (const [index, lane] of lanes.entries()) {
    showStatus(`${RUNS[index].mode.toUpperCase()} is running…`);
    const speculation = { ...body.speculation, mode: RUNS[index].mode };
    await lane.run({ ...body, seed, speculation }, signal, draw);
    seed = lane.seed;
  }
  return compare(lanes, seed);
}

function compare([ar, ssd], seed) {
  const differs = ar.tokens.findIndex((text, place) => text !== ssd.tokens[place]);
  const same = differs < 0 && ar.tokens.length === ssd.tokens.length && ar.text === ssd.text;
  const texts = same
    ? `The same text, token for token: ${ar.found.tokens} tokens, seed ${seed}.`
    : `The texts differ from token ${(differs < 0 ? Math.min(ar.tokens.length, ssd.tokens.length) : differs) + 1} on, seed ${seed}.`;
  if (!ar.found.rate || !ssd.found.rate) return texts;
  const [slow, fast] = [ar, ssd].map((lane) => lane.found.rate.toFixed(1));
  return `${texts} SSD ran at ${(ssd.found.rate / ar.found.rate).toFixed(2)} times the speed of AR: ${fast} instead of ${slow} tokens per second.`;
}

/** Adds a bar for each lane's time, on one scale. Returns a function that draws them. */
function addBars(place, lanes) {
  const made = RUNS.map((one) => {
    const row = place.appendChild(document.createElement("p"));
    const [name, track, time] = ["b", "span", "span"].map((tag) => row.appendChild(document.createElement(tag)));
    name.textContent = one.mode.toUpperCase();
    return { bar: track.appendChild(document.createElement("i")), time };
  });
  return () => {
    const longest = Math.max(...lanes.map((lane) => lane.found.ms), 1);
    lanes.forEach((lane, index) => {
      made[index].bar.style.width = `${(100 * lane.found.ms) / longest}%`;
      made[index].time.textContent = lane.found.ms ? seconds(lane.found.ms) : "";
    });
  };
}
