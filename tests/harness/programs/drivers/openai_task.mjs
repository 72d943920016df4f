// OpenAI's own client for JavaScript: a stream, its runner of tools, and JSON by a schema.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const ai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const text = (await ai.chat.completions.stream({ model, messages }).finalChatCompletion()).choices[0].message.content;

async function task(stream) {
  const cities = [];
  const weather = ({ city }) => { cities.push(city); return "22 C"; };
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  const tool = { type: "function", function: { name: "get_weather", parameters, parse: JSON.parse, function: weather } };
  const answer = await ai.chat.completions.runTools({ model, messages, tools: [tool], stream }).finalContent();
  return { answer, city: cities[0] };
}

const schema = { type: "object", properties: { sure: { type: "boolean" } }, required: ["sure"], additionalProperties: false };
const response_format = { type: "json_schema", json_schema: { name: "form", strict: true, schema } };
const formed = await ai.chat.completions.parse({ model, messages, response_format });
const responded = await ai.responses.stream({ model, input: "hi" }).finalResponse();
console.log(JSON.stringify({
  "chat completions, runTools": { stream: text, ...await task(false), form: formed.choices[0].message.parsed },
  "chat completions, runTools streamed": await task(true),
  "responses": { stream: responded.output_text },
}));
