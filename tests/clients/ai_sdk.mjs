// The Vercel AI SDK against a server: node ai_sdk.mjs URL MODEL
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const given = { baseURL: `${url}/v1`, apiKey: "none" };
let called = 0;
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => (called++, "Done. Answer in words: it is sunny in Oslo, and 21 degrees."),
});
const asked = {
  prompt: "What is the weather in Oslo?",
  tools: { weather },
  temperature: 0,
  maxOutputTokens: 64,
  stopWhen: stepCountIs(3),
};
const failed = (error) => {
  console.error(error);
  process.exit(1);
};

const chat = createOpenAICompatible({ name: "forerun", ...given })(model);
const streamed = streamText({ ...asked, model: chat, onError: ({ error }) => failed(error) });
console.log("chat completions, streamed:", await streamed.text);
if (called !== 1) failed(`error: the tool was called ${called} times`);

const { text } = await generateText({ ...asked, model: createOpenAI(given)(model) });
console.log("responses:", text);
if (called !== 2) failed(`error: the tool was called ${called - 1} times`);
if (!text.includes("21")) failed("error: the answer has no 21");
