// Continue's adapters, as its command line uses them for a server of Ollama.
import { constructLlmApi } from "@continuedev/openai-adapters";

const api = constructLlmApi({
  provider: "ollama",
  apiBase: "http://127.0.0.1:3000",
  apiKey: process.env.INFERENCECENTER_TOKEN,
});

const { signal } = new AbortController();
const model = (await api.list())[0].id;
const body = (content) => ({ model, messages: [{ role: "user", content }] });
const done = {};

done["text"] = (await api.chatCompletionNonStream({ ...body("Hi"), stream: false }, signal)).choices[0].message.content;
done["streaming"] = "";
for await (const chunk of api.chatCompletionStream({ ...body("Hi"), stream: true }, signal)) {
  done["streaming"] += chunk.choices[0]?.delta.content ?? "";
}
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const question = body("How is the weather?");
const { message } = (await api.chatCompletionNonStream({ ...question, tools, stream: false }, signal)).choices[0];
const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
const messages = [...question.messages, message, result];
done["tools"] = (await api.chatCompletionNonStream({ model, messages, tools, stream: false }, signal)).choices[0].message.content;
done["reasoning"] = (await api.chatCompletionNonStream({ ...body("Please think."), stream: false }, signal)).choices[0].message.reasoning_content;
// Its adapter of Mistral completes code; the scripted model has no tokens for gaps, so there is no suffix.
const coder = constructLlmApi({ provider: "mistral", apiBase: "http://127.0.0.1:3000/v1/", apiKey: process.env.INFERENCECENTER_TOKEN });
let completed = "";
for await (const chunk of coder.fimStream({ model, prompt: "Hi", stream: true }, signal)) {
  completed += chunk.choices[0]?.delta.content ?? "";
}
if (completed !== done["text"]) throw new Error(completed);
try {
  await constructLlmApi({ provider: "ollama", apiBase: "http://127.0.0.1:3000", apiKey: "ic_wrong" }).list();
} catch (error) {
  done["errors"] = error.status;
}
console.log(JSON.stringify(done));
