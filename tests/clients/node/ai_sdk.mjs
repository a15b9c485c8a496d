// The AI SDK: OpenAI's provider over responses (its default) and chat, and Anthropic's.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { embedMany, generateText, Output, stepCountIs, streamText } from "ai";
import { CALL, City, IMAGE, JSON_TEXT, MODEL, REASONED_CALL, tools, url, user } from "./said.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const models = {
  responses: openai(MODEL),
  chat: openai.chat(MODEL),
  messages: createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(MODEL),
};

for (const [api, model] of Object.entries(models)) {
  test(`${api}: text, whole and streamed`, async () => {
    const whole = await generateText({ model, system: "be brief", prompt: "hi you" });
    assert.deepEqual([whole.text, whole.finishReason], ["hi you", "stop"]);
    const stream = streamText({ model, prompt: "hi you" });
    let text = "";
    for await (const delta of stream.textStream) text += delta;
    assert.equal(text, "hi you");
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  });

  test(`${api}: steps of tools after reasoning`, async () => {
    const asked = { model, tools, stopWhen: stepCountIs(2), prompt: REASONED_CALL };
    const { steps } = await generateText(asked);
    const stream = streamText(asked);
    for await (const part of stream.fullStream) assert.notEqual(part.type, "error");
    for (const done of [steps, await stream.steps])
      assert.deepEqual(
        done.map((step) => step.toolResults.map((result) => result.output)),
        [["rain in Bern"], ["rain in Bern"]],
      );
  });

  test(`${api}: calls that are forced`, async () => {
    for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
      const [call] = (await generateText({ model, tools, toolChoice, prompt: CALL })).toolCalls;
      assert.deepEqual(call.input, { city: "Bern" });
    }
  });

  test(`${api}: an object`, async () => {
    const { output } = await generateText({ model, output: Output.object({ schema: City }), prompt: JSON_TEXT });
    assert.deepEqual(output, { city: "Bern" });
  });

  test(`${api}: a conversation`, async () => {
    for (const store of [true, false]) {
      const providerOptions = { openai: { store, reasoningEffort: "minimal", forceReasoning: true } };
      const first = await generateText({ model, prompt: "<think>hm</think>a", providerOptions });
      const messages = [...user("a"), ...first.response.messages, ...user("z")];
      assert.equal((await generateText({ model, messages, providerOptions })).text, "z");
    }
  });

  test(`${api}: images are refused`, async () => {
    const messages = user([{ type: "image", image: IMAGE }]);
    await assert.rejects(generateText({ model, messages, maxRetries: 0 }), /type '(input_image|image_url|image)'/);
  });

  test(`${api}: an aborted stream`, async () => {
    const controller = new AbortController();
    const stream = streamText({ model, prompt: "x".repeat(900), abortSignal: controller.signal });
    const kinds = [];
    for await (const part of stream.fullStream) {
      kinds.push(part.type);
      if (kinds.length === 6) controller.abort();
    }
    assert.equal(kinds.at(-1), "abort");
  });
}

test("completions and embeddings", async () => {
  const done = await generateText({ model: openai.completion(MODEL), prompt: "x", maxOutputTokens: 4 });
  assert.equal(done.finishReason, "length");
  const { embeddings } = await embedMany({ model: openai.embedding(MODEL), values: ["a", "b"] });
  assert.deepEqual(embeddings.map((one) => one.length), [16, 16]);
});
