// Anthropic's own client for JavaScript: a stream, and its runner of tools, whole and streamed.
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const claude = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const asked = { model, max_tokens: 100, messages: [{ role: "user", content: "hi" }] };
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

async function task(stream) {
  const cities = [];
  const run = ({ city }) => { cities.push(city); return "22 C"; };
  const tools = [{ name: "get_weather", input_schema, run, parse: (given) => given }];
  const last = await claude.beta.messages.toolRunner({ ...asked, tools, stream }).runUntilDone();
  return { answer: last.content[0].text, city: cities[0] };
}

const text = await claude.messages.stream(asked).finalText();
console.log(JSON.stringify({
  "messages, tool runner": { stream: text, ...await task(false) },
  "messages, tool runner streamed": await task(true),
}));
