// The npm package `ollama`.

import { Ollama } from "ollama";
import { EMBEDDER, HELLO, KEY, MODEL, WEATHER, assert, check, run } from "./steps.mjs";

const [url, vectors] = process.argv.slice(2);
const headers = { Authorization: `Bearer ${KEY}` };
const client = new Ollama({ host: url, headers });
const asked = { model: MODEL, messages: HELLO, options: { num_predict: 16, temperature: 0 } };

async function streamsEqualAnswers() {
  const whole = await client.chat(asked);
  let text = "";
  for await (const part of await client.chat({ ...asked, stream: true })) text += part.message.content;
  assert(text === whole.message.content, `${text} is not ${whole.message.content}`);
  assert((await client.list()).models[0].model.startsWith(MODEL));
}

async function answersFollowSchemas() {
  const reply = await client.chat({ ...asked, format: WEATHER, options: { num_predict: 400 } });
  check(JSON.parse(reply.message.content));
}

async function textsAreEmbedded() {
  const made = new Ollama({ host: vectors, headers });
  const { embeddings } = await made.embed({ model: EMBEDDER, input: ["a", "b"] });
  assert(embeddings.length === 2);
}

await run("ollama", [streamsEqualAnswers, answersFollowSchemas, textsAreEmbedded]);
