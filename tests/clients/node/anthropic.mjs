// Anthropic's client: the first examples of its documentation.
import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { CALL, City, JSON_TEXT, MODEL, REASONED_CALL, SCHEMA, url, user, weather } from "./said.mjs";

const client = new Anthropic({ baseURL: url, apiKey: "none" });
const tool = { name: "weather", input_schema: SCHEMA };
const asked = (text) => ({ model: MODEL, max_tokens: 1024, messages: user(text) });

test("a message, whole and streamed", async () => {
  assert.deepEqual((await client.messages.create(asked("hi"))).content, [{ type: "text", text: "hi" }]);
  const seen = new Set();
  const stream = client.messages.stream({ ...asked(REASONED_CALL), tools: [tool] });
  for (const kind of ["thinking", "text", "inputJson", "contentBlock"]) stream.on(kind, () => seen.add(kind));
  const kinds = (await stream.finalMessage()).content.map((block) => block.type);
  assert.deepEqual(kinds, ["thinking", "text", "tool_use"]);
  assert.equal(seen.size, 4);
});

for (const choice of [{ type: "auto" }, { type: "any" }, { type: "tool", name: "weather" }]) {
  test(`tool choice ${choice.type}`, async () => {
    const [call] = (await client.messages.create({ ...asked(CALL), tools: [tool], tool_choice: choice })).content;
    assert.deepEqual(call.input, { city: "Bern" });
  });
}

test("the tool runner", async () => {
  const cities = [];
  const run = (input) => (cities.push(input.city), weather(input));
  const runnable = betaZodTool({ name: "weather", description: "the weather", inputSchema: City, run });
  await client.beta.messages.toolRunner({ ...asked(CALL), tools: [runnable], max_iterations: 2 });
  assert.equal(cities[0], "Bern");
});

test("a schema and a count", async () => {
  const format = zodOutputFormat(City);
  const parsed = await client.messages.parse({ ...asked(JSON_TEXT), output_config: { format } });
  assert.deepEqual(parsed.parsed_output, { city: "Bern" });
  assert.ok((await client.messages.countTokens({ model: MODEL, messages: user("hi") })).input_tokens > 0);
});

test("errors", async () => {
  await assert.rejects(client.messages.create({ ...asked("a"), model: "another" }), Anthropic.NotFoundError);
});
