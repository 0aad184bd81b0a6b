// Vercel's AI SDK with its provider for OpenAI-compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const inferencecenter = createOpenAICompatible({
  name: "inferencecenter",
  baseURL: "http://127.0.0.1:3000/v1",
  apiKey: process.env.INFERENCECENTER_TOKEN,
  supportsStructuredOutputs: true,
});
const model = inferencecenter("script");

const done = {};
done["text"] = (await generateText({ model, prompt: "Hi" })).text;
done["streaming"] = await streamText({ model, prompt: "Hi" }).text;
const get_weather = tool({ inputSchema: z.object({ city: z.string() }), execute: async () => "sunny" });
const agent = { model, tools: { get_weather }, stopWhen: stepCountIs(5), prompt: "How is the weather?" };
done["tools"] = (await generateText(agent)).text;
const schema = z.object({ name: z.string(), age: z.number().int() });
done["structured output"] = (await generateText({ model, prompt: "Who is Ada?", output: Output.object({ schema }) })).output;
done["reasoning"] = (await generateText({ model, prompt: "Please think." })).reasoningText;
try {
  await generateText({ model, prompt: "Please fail.", maxRetries: 0 });
} catch (error) {
  done["errors"] = error.statusCode;
}
console.log(JSON.stringify(done));
