// The openai package of npm: chat completions, tools by its runner, responses.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: "http://127.0.0.1:3000/v1", apiKey: process.env.INFERENCECENTER_TOKEN, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;

const ask = (content) => [{ role: "user", content }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const done = {};

done["text"] = (await client.chat.completions.create({ model, messages: ask("Hi") })).choices[0].message.content;
done["streaming"] = await client.chat.completions.stream({ model, messages: ask("Hi") }).finalContent();
const tool = { name: "get_weather", parameters, parse: JSON.parse, function: () => "sunny" };
const tools = [{ type: "function", function: tool }];
done["tools"] = await client.chat.completions.runTools({ model, messages: ask("How is the weather?"), tools }).finalContent();
const person = { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"] };
const response_format = { type: "json_schema", json_schema: { name: "person", strict: true, schema: { ...person, additionalProperties: false } } };
const parsed = await client.chat.completions.parse({ model, messages: ask("Who is Ada?"), response_format });
done["structured output"] = JSON.parse(parsed.choices[0].message.content);
done["reasoning"] = (await client.chat.completions.create({ model, messages: ask("Please think.") })).choices[0].message.reasoning_content;
try {
  await client.chat.completions.create({ model, messages: ask("Please fail.") });
} catch (error) {
  done["errors"] = error.code;
}
done["responses"] = (await client.responses.create({ model, input: "Please think." })).output_text;
console.log(JSON.stringify(done));
