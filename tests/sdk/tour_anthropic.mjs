// The npm package `@anthropic-ai/sdk`.

import Anthropic from "@anthropic-ai/sdk";
import { HELLO, KEY, MODEL, WEATHER, assert, check, fails, run } from "./steps.mjs";

const url = process.argv[2];
const options = { baseURL: url, apiKey: KEY, maxRetries: 0, timeout: 120_000 };
const client = new Anthropic(options);
const tool = { name: "get_weather", description: "Weather of a city", input_schema: WEATHER };

const ask = (fields = {}, more = {}) =>
  client.messages.create({ model: MODEL, messages: HELLO, max_tokens: 16, temperature: 0, ...fields }, more);

async function chat() {
  const reply = await ask({ system: "Be brief." });
  assert(["end_turn", "max_tokens"].includes(reply.stop_reason));
  const counted = await client.messages.countTokens({ model: MODEL, messages: HELLO });
  assert(counted.input_tokens > 0);
}

async function streamedChat() {
  const whole = await ask();
  const body = { model: MODEL, messages: HELLO, max_tokens: 16, temperature: 0 };
  const kinds = [];
  const stream = client.messages.stream(body).on("streamEvent", (event) => kinds.push(event.type));
  const final = await stream.finalMessage();
  assert(JSON.stringify(final.content) === JSON.stringify(whole.content));
  assert(kinds[0] === "message_start" && kinds.at(-1) === "message_stop");
}

async function toolsWithResults() {
  const choice = { type: "any", disable_parallel_tool_use: true };
  const fields = { tools: [tool], tool_choice: choice, max_tokens: 1200 };
  const reply = await ask(fields);
  assert(reply.stop_reason === "tool_use");
  const call = reply.content.find((block) => block.type === "tool_use");
  check(call.input);
  const streamed = client.messages.stream({ model: MODEL, messages: HELLO, ...fields });
  check((await streamed.finalMessage()).content.find((block) => block.type === "tool_use").input);
  const result = { type: "tool_result", tool_use_id: call.id, content: "rain" };
  const history = [...HELLO, { role: "assistant", content: reply.content }, { role: "user", content: [result] }];
  await ask({ messages: history, tools: [tool] });
}

async function errors() {
  const error = await fails(Anthropic.BadRequestError, () => ask({ messages: [] }));
  assert(error.error.type === "error");
  const wrong = new Anthropic({ ...options, apiKey: "wrong" });
  const body = { model: MODEL, messages: HELLO, max_tokens: 1 };
  await fails(Anthropic.AuthenticationError, () => wrong.messages.create(body));
}

async function timeouts() {
  await fails(Anthropic.APIConnectionTimeoutError, () => ask({ max_tokens: 400 }, { timeout: 1 }));
}

async function retries() {
  let tries = 0;
  const counting = (...args) => {
    tries += 1;
    return fetch(...args);
  };
  const patient = new Anthropic({ ...options, maxRetries: 1, fetch: counting });
  const body = { model: MODEL, messages: HELLO, max_tokens: 400, timeout: 0.001 };
  const error = await fails(Anthropic.InternalServerError, () => patient.messages.create(body));
  assert(error.status === 503 && tries === 2, `${error.status} after ${tries}`);
}

await run("@anthropic-ai/sdk (npm)", [chat, streamedChat, toolsWithResults, errors, timeouts, retries]);
