// OpenAI's client: the first examples of its documentation.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { CALL, City, IMAGE, JSON_TEXT, MODEL, REASONED_CALL, SCHEMA, url, user, weather } from "./said.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const tool = { type: "function", function: { name: "weather", parameters: SCHEMA, strict: true } };

test("chat, whole and streamed", async () => {
  const whole = await client.chat.completions.create({ model: MODEL, messages: user("hi you") });
  assert.equal(whole.choices[0].message.content, "hi you");
  const stream = client.chat.completions.stream({ model: MODEL, messages: user("hi you") });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  await stream.done();
  assert.equal(text, "hi you");
});

for (const choice of ["auto", "required", { type: "function", function: { name: "weather" } }]) {
  test(`tool choice ${JSON.stringify(choice)}`, async () => {
    const asked = { model: MODEL, messages: user(CALL), tools: [tool], tool_choice: choice };
    const [call] = (await client.chat.completions.create(asked)).choices[0].message.tool_calls;
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Bern" });
  });
}

test("a loop of tools", async () => {
  for (const stream of [false, true]) {
    const runnable = {
      type: "function",
      function: { name: "weather", parse: JSON.parse, function: weather, parameters: SCHEMA },
    };
    const asked = { model: MODEL, messages: user(CALL), tools: [runnable], stream };
    const runner = client.chat.completions.runTools(asked, { maxChatCompletions: 2 });
    const results = [];
    runner.on("functionToolCallResult", (result) => results.push(result));
    await runner.done();
    assert.deepEqual(results, ["rain in Bern", "rain in Bern"]);
  }
});

test("structured outputs", async () => {
  const chat = { model: MODEL, messages: user(JSON_TEXT), response_format: zodResponseFormat(City, "city") };
  assert.deepEqual((await client.chat.completions.parse(chat)).choices[0].message.parsed, { city: "Bern" });
  const response = { model: MODEL, input: JSON_TEXT, text: { format: zodTextFormat(City, "city") } };
  assert.deepEqual((await client.responses.parse(response)).output_parsed, { city: "Bern" });
});

test("responses", async () => {
  const asked = { model: MODEL, input: "hi", reasoning: { effort: "minimal" } };
  assert.equal((await client.responses.create(asked)).output_text, "hi");
  const tools = [{ type: "function", name: "weather", parameters: SCHEMA, strict: true }];
  const stream = client.responses.stream({ model: MODEL, input: REASONED_CALL, tools });
  const kinds = new Set();
  for await (const event of stream) kinds.add(event.type);
  for (const kind of ["reasoning_text.delta", "output_text.delta", "function_call_arguments.done", "completed"])
    assert.ok(kinds.has(`response.${kind}`), kind);
  const items = (await stream.finalResponse()).output.map((item) => item.type);
  assert.deepEqual(items, ["reasoning", "message", "function_call"]);
});

test("embeddings and models", async () => {
  const found = await client.embeddings.create({ model: MODEL, input: ["a", "b"] });
  assert.deepEqual(found.data.map((one) => one.embedding.length), [16, 16]);
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

test("errors", async () => {
  const image = user([{ type: "image_url", image_url: { url: IMAGE } }]);
  await assert.rejects(client.chat.completions.create({ model: MODEL, messages: image }), OpenAI.BadRequestError);
  const unknown = client.chat.completions.create({ model: "another", messages: user("a") });
  await assert.rejects(unknown, (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
});

test("an aborted stream", async () => {
  const stream = await client.chat.completions.create({ model: MODEL, messages: user("x".repeat(900)), stream: true });
  let chunks = 0;
  for await (const _ of stream) if (++chunks === 5) stream.controller.abort();
  assert.equal(chunks, 5);
});
