// The AI SDK: packages `ai`, `@ai-sdk/openai-compatible`, `@ai-sdk/openai` and `@ai-sdk/anthropic`.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, jsonSchema, Output, streamText, tool } from "ai";
import { EMBEDDER, KEY, MODEL, WEATHER, assert, check, run } from "./steps.mjs";

const [url, vectors] = process.argv.slice(2);
const compatible = createOpenAICompatible({
  name: "sylvan", baseURL: `${url}/v1`, apiKey: KEY, supportsStructuredOutputs: true,
});
const models = [
  compatible(MODEL),
  createOpenAI({ baseURL: `${url}/v1`, apiKey: KEY }).responses(MODEL),
  createAnthropic({ baseURL: `${url}/v1`, apiKey: KEY })(MODEL),
];
const asked = { prompt: "Hello", maxOutputTokens: 16, temperature: 0, maxRetries: 0 };

async function streamsEqualAnswers() {
  for (const model of models) {
    const whole = await generateText({ model, ...asked });
    let text = "";
    for await (const part of streamText({ model, ...asked }).textStream) text += part;
    assert(text === whole.text, `${text} is not ${whole.text}`);
    assert(whole.usage.outputTokens <= 16);
  }
}

async function toolsAreCalled() {
  const tools = { get_weather: tool({ description: "Weather", inputSchema: jsonSchema(WEATHER) }) };
  const reply = await generateText({
    model: models[0], ...asked, maxOutputTokens: 1200, tools, toolChoice: "required",
  });
  check(reply.toolCalls[0].input);
}

async function objectsFollowSchemas() {
  for (const model of models.slice(0, 2)) {
    const output = Output.object({ schema: jsonSchema(WEATHER) });
    const reply = await generateText({ model, ...asked, maxOutputTokens: 400, output });
    check(reply.output);
  }
}

async function textsAreEmbedded() {
  const made = createOpenAICompatible({ name: "sylvan", baseURL: `${vectors}/v1`, apiKey: KEY });
  const { embedding } = await embed({ model: made.textEmbeddingModel(EMBEDDER), value: "text" });
  assert(Math.abs(embedding.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-4);
}

await run("ai", [streamsEqualAnswers, toolsAreCalled, objectsFollowSchemas, textsAreEmbedded]);
