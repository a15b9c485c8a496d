// What the model is told to say, and the schemas that it fits. The service is SERVICE_URL.
import { tool } from "ai";
import { z } from "zod";

export const url = process.env.SERVICE_URL;
export const MODEL = "echo";
export const JSON_TEXT = '{"city": "Bern"}';
export const CALL = `<tool_call>\n{"name": "weather", "arguments": ${JSON_TEXT}}\n</tool_call>`;
export const REASONED_CALL = `<think>hm</think>Look.${CALL}`;
export const City = z.object({ city: z.string() });
export const SCHEMA = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const IMAGE = "data:image/png;base64,iVBORw0KGgo=";
export const weather = ({ city }) => `rain in ${city}`;
export const tools = {
  weather: tool({ description: "the weather", inputSchema: City, execute: async (input) => weather(input) }),
};
export const user = (content) => [{ role: "user", content }];
