/** The figures of a request: from its rounds while it runs, from the server's timings at its end. */

/** Returns the figures of the rounds so far; milliseconds count from the first token, as in the server's timings. */
export function ofRounds(rounds) {
  const ends = rounds.map((round) => round.verify.start_ms + round.verify.ms);
  const sum = (of) => rounds.reduce((total, round) => total + of(round), 0);
  const ms = rounds.length > 1 ? ends.at(-1) - ends[0] : 0;
  const tokens = sum((round) => round.tokens);
  return {
    tokens,
    ms,
    rate: ms > 0 ? (1000 * (tokens - rounds[0].tokens)) / ms : 0,
    hits: sum((round) => round.lookup === "hit" || round.lookup === "grown"),
    lookups: sum((round) => round.lookup !== "none"),
    drafted: sum((round) => round.drafted),
    accepted: sum((round) => round.accepted),
  };
}

export function ofTimings(timings) {
  return {
    tokens: timings.predicted_n,
    ms: timings.predicted_ms,
    rate: timings.predicted_per_second,
    hits: timings.cache_hits,
    lookups: timings.cache_hits + timings.cache_misses,
    drafted: timings.draft_n,
    accepted: timings.draft_n_accepted,
  };
}

export function seconds(ms) {
  return `${(ms / 1000).toFixed(2)} s`;
}

/** Writes the figures into the elements of `list`. */
export function show(list, found) {
  const put = (name, words) => (list.querySelector(`[data-figure=${name}]`).textContent = words);
  put("rate", found.rate ? found.rate.toFixed(1) : "–");
  put("tokens", found.tokens);
  put("hits", found.lookups ? `${found.hits} of ${found.lookups}` : "–");
  put("accepted", found.drafted ? `${found.accepted} of ${found.drafted}` : "–");
  put("time", found.ms ? seconds(found.ms) : "–");
}
