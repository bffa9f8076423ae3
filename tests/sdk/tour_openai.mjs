// The npm package `openai`.

import OpenAI, { toFile } from "openai";
import { EMBEDDER, HELLO, KEY, MODEL, TWO_CALLS, WEATHER, assert, check, fails, run } from "./steps.mjs";

const [url, vectors] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: KEY, maxRetries: 0, timeout: 120_000 });
const tool = { type: "function", function: { name: "get_weather", parameters: WEATHER, strict: true } };
const plan = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, sunny: { type: "boolean" } },
  required: ["city", "sunny"],
  additionalProperties: false,
};
const late = { max_tokens: 400, timeout: 0.001, ignore_eos: true };

const ask = (fields = {}, options = {}) =>
  client.chat.completions.create(
    { model: MODEL, messages: HELLO, max_tokens: 16, temperature: 0, ...fields },
    options,
  );

async function chat() {
  const reply = await ask();
  assert(["stop", "length"].includes(reply.choices[0].finish_reason));
  assert(reply.usage.total_tokens === reply.usage.prompt_tokens + reply.usage.completion_tokens);
  assert((await client.models.list()).data[0].id === MODEL);
}

async function streamedChat() {
  const whole = await ask();
  let text = "";
  for await (const chunk of await ask({ stream: true })) text += chunk.choices[0]?.delta.content ?? "";
  assert(text === whole.choices[0].message.content, text);
}

async function toolsWithResults() {
  const fields = { tools: [tool], tool_choice: "required", parallel_tool_calls: false, max_tokens: 1200 };
  const { message, finish_reason } = (await ask(fields)).choices[0];
  assert(finish_reason === "tool_calls");
  check(JSON.parse(message.tool_calls[0].function.arguments));
  const streamed = await client.chat.completions
    .stream({ model: MODEL, messages: HELLO, temperature: 0, ...fields })
    .finalChatCompletion();
  check(JSON.parse(streamed.choices[0].message.tool_calls[0].function.arguments));
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "rain" };
  await ask({ messages: [...HELLO, message, result], tools: [tool] });
}

async function parallelTools() {
  const reply = await ask({ tools: [tool], regex: TWO_CALLS, max_tokens: 200 });
  const calls = reply.choices[0].message.tool_calls;
  assert(calls.length === 2 && calls[0].id !== calls[1].id);
  for (const call of calls) check(JSON.parse(call.function.arguments));
}

async function structuredParse() {
  const format = { type: "json_schema", json_schema: { name: "plan", schema: plan, strict: true } };
  const body = { model: MODEL, messages: HELLO, max_tokens: 1200, response_format: format };
  const reply = await client.chat.completions.parse(body);
  assert(typeof JSON.parse(reply.choices[0].message.content).sunny === "boolean");
}

async function embeddings() {
  const made = new OpenAI({ baseURL: `${vectors}/v1`, apiKey: KEY, maxRetries: 0 }).embeddings;
  const reply = await made.create({ model: EMBEDDER, input: ["one", "two"] });
  const [one, two] = reply.data.map((item) => Array.from(item.embedding));
  for (const vector of [one, two]) {
    assert(Math.abs(vector.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-4, vector);
  }
  assert(reply.usage.prompt_tokens > 0);
  const floats = await made.create({ model: EMBEDDER, input: "two", encoding_format: "float" });
  assert(floats.data[0].embedding.every((x, i) => Math.abs(x - two[i]) < 1e-5));
  const short = await made.create({ model: EMBEDDER, input: "two", dimensions: 8 });
  assert(short.data[0].embedding.length === 8);
  await fails(OpenAI.BadRequestError, () => client.embeddings.create({ model: MODEL, input: "one" }));
}

async function responses() {
  const first = await client.responses.create({ model: MODEL, input: "Hello", max_output_tokens: 8 });
  assert((await client.responses.retrieve(first.id)).output_text === first.output_text);
  const more = { model: MODEL, input: "More", previous_response_id: first.id, max_output_tokens: 8 };
  const kinds = [];
  for await (const event of await client.responses.create({ ...more, stream: true })) kinds.push(event.type);
  assert(kinds[0] === "response.created");
  assert(["response.completed", "response.incomplete"].includes(kinds.at(-1)));
}

async function batches() {
  const body = { model: MODEL, messages: HELLO, max_tokens: 2 };
  const line = { custom_id: "a", method: "POST", url: "/v1/chat/completions", body };
  const data = await toFile(Buffer.from(JSON.stringify(line)), "in.jsonl");
  const file = await client.files.create({ file: data, purpose: "batch" });
  const wanted = { input_file_id: file.id, endpoint: line.url, completion_window: "24h" };
  let batch = await client.batches.create(wanted);
  const deadline = performance.now() + 120_000;
  while (["in_progress", "finalizing"].includes(batch.status) && performance.now() < deadline) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    batch = await client.batches.retrieve(batch.id);
  }
  assert(batch.status === "completed", batch.status);
  const output = await (await client.files.content(batch.output_file_id)).text();
  assert(JSON.parse(output).response.status_code === 200);
}

async function errors() {
  await fails(OpenAI.BadRequestError, () => ask({ temperature: -1 }));
  await fails(OpenAI.NotFoundError, () => client.models.retrieve("nothing"));
  const wrong = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 });
  await fails(OpenAI.AuthenticationError, () => wrong.models.list());
}

async function timeouts() {
  const endless = { max_tokens: 400, ignore_eos: true };
  await fails(OpenAI.APIConnectionTimeoutError, () => ask(endless, { timeout: 1 }));
}

async function retries() {
  let tries = 0;
  const counting = (...args) => {
    tries += 1;
    return fetch(...args);
  };
  const patient = new OpenAI({ baseURL: `${url}/v1`, apiKey: KEY, maxRetries: 1, fetch: counting });
  const body = { model: MODEL, messages: HELLO, ...late };
  const error = await fails(OpenAI.InternalServerError, () => patient.chat.completions.create(body));
  assert(error.status === 503 && tries === 2, `${error.status} after ${tries}`);
}

await run("openai (npm)", [
  chat, streamedChat, toolsWithResults, parallelTools, structuredParse, embeddings, responses,
  batches, errors, timeouts, retries,
]);
