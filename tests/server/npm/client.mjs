// A whole task by OpenAI's own client for JavaScript: a stream, a tool and its result, a schema, a response.
// Told on stdout as one JSON object: node client.mjs http://127.0.0.1:8080
import OpenAI from "openai";

const ai = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await ai.models.list()).data[0].id;
const messages = [{ role: "user", content: "hi" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];

const streamed = ai.chat.completions.stream({ model, messages, stream_options: { include_usage: true } });
const text = (await streamed.finalChatCompletion()).choices[0].message.content;
const usage = await streamed.totalUsage();

const cities = [];
const weather = ({ city }) => { cities.push(city); return "22 C"; };
const runnable = { type: "function", function: { name: "get_weather", parameters, parse: JSON.parse, function: weather } };
const answer = await ai.chat.completions.runTools({ model, messages, tools: [runnable], stream: true }).finalContent();

const schema = { type: "object", properties: { sure: { type: "boolean" } }, required: ["sure"], additionalProperties: false };
const response_format = { type: "json_schema", json_schema: { name: "form", strict: true, schema } };
const formed = await ai.chat.completions.parse({ model, messages, response_format });

const responded = await ai.responses.stream({ model, input: "hi" }).finalResponse();
const called = await ai.responses.stream({ model, input: "hi", tools: [{ type: "function", strict: false, ...tools[0].function }] })
  .finalResponse();

const refused = await ai.chat.completions.create({ model: "nonsense", messages }).catch((error) => error);

console.log(JSON.stringify({
  text, tokens: usage.completion_tokens, cities, answer, sure: typeof formed.choices[0].message.parsed.sure,
  responded: responded.output_text, called: called.output.at(-1).arguments, refused: [refused.status, refused.code],
}));
