// The official Node client of OpenAI against a running server. Prints one JSON line for each check that passed.
// Environment: BASE_URL, API_KEY, MODEL, CLIENT_FOLDER (where node_modules is).
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const OpenAI = createRequire(`${process.env.CLIENT_FOLDER}/`)("openai").default;
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "Name the capital of France in one sentence." }];
const paris = "The capital of France is Paris.";
const schema = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, unit: { enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters: schema, strict: true } }];
const greedy = { model, messages, temperature: 0, max_tokens: 200 };
const keys = (text) => Object.keys(JSON.parse(text)).sort();

const checks = {
  async models() {
    const listed = await client.models.list();
    assert.deepEqual(listed.data.map((one) => one.id), [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  async chat() {
    const answer = await client.chat.completions.create({ ...greedy, user: "u", metadata: { a: "b" } });
    assert.equal(answer.choices[0].message.content, paris);
    assert.equal(answer.choices[0].finish_reason, "stop");
  },
  async stream() {
    const stream = await client.chat.completions.create({
      ...greedy, stream: true, stream_options: { include_usage: true },
    });
    let text = "", usage;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, paris);
    assert.ok(usage.completion_tokens > 5);
  },
  async streamHelper() {
    const final = await client.chat.completions.stream(greedy).finalChatCompletion();
    assert.equal(final.choices[0].message.content, paris);
  },
  async leavingEarly() {
    const stream = await client.chat.completions.create({ ...greedy, stream: true, max_tokens: 1000 });
    for await (const _ of stream) break;
    stream.controller.abort();
  },
  async choicesAndLogprobs() {
    const answer = await client.chat.completions.create({
      ...greedy, temperature: 1, n: 2, seed: 3, logprobs: true, top_logprobs: 2, max_tokens: 5,
    });
    assert.equal(answer.choices.length, 2);
    assert.equal(answer.choices[0].logprobs.content[0].top_logprobs.length, 2);
  },
  async tools() {
    const options = { ...greedy, tools, tool_choice: "required", parallel_tool_calls: false };
    const whole = (await client.chat.completions.create(options)).choices[0];
    const [call] = whole.message.tool_calls;
    assert.equal(whole.finish_reason, "tool_calls");
    assert.deepEqual(keys(call.function.arguments), ["city", "unit"]);
    const streamed = await client.chat.completions.stream(options).finalChatCompletion();
    const [same] = streamed.choices[0].message.tool_calls;
    assert.deepEqual(JSON.parse(same.function.arguments), JSON.parse(call.function.arguments));
    const turns = [...messages, whole.message, { role: "tool", tool_call_id: call.id, content: "21" }];
    const after = await client.chat.completions.create({ ...greedy, messages: turns, tools, max_tokens: 5 });
    assert.ok(after.usage.prompt_tokens > 100);
  },
  async schema() {
    const response_format = { type: "json_schema", json_schema: { name: "place", schema, strict: true } };
    const answer = await client.chat.completions.create({ ...greedy, response_format });
    assert.deepEqual(keys(answer.choices[0].message.content), ["city", "unit"]);
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: "1 2 3 4", max_tokens: 4, stop: ["zz"] });
    assert.ok(answer.choices[0].text);
  },
  async responses() {
    const options = { model, input: messages[0].content, temperature: 0 };
    const whole = await client.responses.create(options);
    assert.ok(whole.output_text.includes("Paris"));
    const stream = await client.responses.create({ ...options, stream: true });
    let text = "", last;
    for await (const event of stream) {
      text += event.type === "response.output_text.delta" ? event.delta : "";
      last = event.type;
    }
    assert.equal(text, whole.output_text);
    assert.equal(last, "response.completed");
    assert.equal((await client.responses.retrieve(whole.id)).output_text, whole.output_text);
    await client.responses.delete(whole.id);
    await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ ...greedy, model: "nope" }), (error) => {
      return error instanceof OpenAI.NotFoundError && error.code === "model_not_found";
    });
    await assert.rejects(
      client.chat.completions.create({ ...greedy, max_tokens: -1, stream: true }),
      OpenAI.BadRequestError,
    );
    const stranger = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
    await assert.rejects(client.embeddings.create({ model, input: "x" }), OpenAI.NotFoundError);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(JSON.stringify({ passed: name }));
}
