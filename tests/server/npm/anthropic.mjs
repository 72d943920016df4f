// Anthropic's own runner of tools for JavaScript, whole and streamed: node anthropic.mjs http://127.0.0.1:8080
import Anthropic from "@anthropic-ai/sdk";

const claude = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = (await claude.models.list()).data[0].id;
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

async function task(stream) {
  const cities = [];
  const run = ({ city }) => { cities.push(city); return "22 C"; };
  const tools = [{ name: "get_weather", input_schema, run, parse: (given) => given }];
  const asked = { model, max_tokens: 100, messages: [{ role: "user", content: "hi" }], tools };
  const last = await claude.beta.messages.toolRunner({ ...asked, stream }).runUntilDone();
  return [cities, last.content[0].text];
}

console.log(JSON.stringify({ whole: await task(false), streamed: await task(true) }));
