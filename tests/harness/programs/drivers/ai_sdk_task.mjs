// Vercel's AI SDK: chat completions by its provider for anything OpenAI-like, and messages by Anthropic's.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const prompt = "hi";

async function task(model) {
  let text = "";
  for await (const part of streamText({ model, prompt }).textStream) text += part;
  const cities = [];
  const execute = async ({ city }) => { cities.push(city); return "22 C"; };
  const get_weather = tool({ description: "The weather of a city", inputSchema: z.object({ city: z.string() }), execute });
  const answer = streamText({ model, prompt, tools: { get_weather }, stopWhen: stepCountIs(3) });
  const said = (await answer.steps).at(-1).text;
  const output = Output.object({ schema: z.object({ sure: z.boolean() }) });
  const formed = await generateText({ model, prompt, output });
  return { stream: text, city: cities[0], answer: said, form: formed.output };
}

const openai = createOpenAICompatible({ name: "outrider", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const claude = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
console.log(JSON.stringify({
  "chat completions": await task(openai(name)),
  "messages": await task(claude(name)),
}));
