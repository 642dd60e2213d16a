// The official JavaScript clients against a running service: whole answers, streams, tools, errors, aborts.
// `node suite.mjs URL`; the service says what its test scripted. Exits with 1 and the reason on the first mistake.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const url = process.argv[2];
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 10_000 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0, timeout: 10_000 });
const said = (content) => [{ role: "user", content }];
const parameters = { type: "object", properties: { city: { type: "string" } } };
const functions = [{ type: "function", function: { name: "weather", parameters } }];
const tools = [{ name: "weather", input_schema: parameters }];
const model = "tiny";

const suite = {
  async "openai: a chat is answered"() {
    const answer = await openai.chat.completions.create({ model, messages: said("hello") });
    assert.equal(answer.choices[0].message.content, "Hello there.");
    assert.equal(answer.choices[0].finish_reason, "stop");
    assert.equal(answer.usage.prompt_tokens, 9);
  },

  async "openai: the client's own accumulator takes the stream"() {
    const stream = openai.chat.completions.stream({
      model,
      messages: said("hello"),
      stream_options: { include_usage: true },
    });
    let text = "";
    stream.on("content", (delta) => (text += delta));
    const final = await stream.finalChatCompletion();
    assert.equal(text, "Hello there.");
    assert.equal(final.choices[0].message.content, text);
    assert.equal(final.usage.completion_tokens, 5);
  },

  async "openai: tools are called, and their results are read"() {
    const asked = [];
    const runner = openai.chat.completions.runTools({
      model,
      messages: said("tool"),
      tools: [
        {
          type: "function",
          function: {
            name: "weather",
            parameters,
            parse: JSON.parse,
            function: ({ city }) => (asked.push(city), "rain"),
          },
        },
      ],
    });
    assert.equal(await runner.finalContent(), "Hello there.");
    assert.deepEqual(asked, ["Köln"]);
  },

  async "openai: a completion and a response"() {
    const completion = await openai.completions.create({ model, prompt: "hello" });
    assert.equal(completion.choices[0].text, "Hello there.");
    const made = await openai.responses.create({ model, input: "hello" });
    assert.equal(made.output_text, "Hello there.");
    assert.equal((await openai.responses.retrieve(made.id)).output_text, made.output_text);
    const events = [];
    for await (const event of await openai.responses.create({ model, input: "tool", tools: [
      { type: "function", name: "weather", parameters, strict: false },
    ], stream: true })) events.push(event);
    assert.equal(events.at(-1).type, "response.completed");
    assert.equal(events.at(-1).response.output[0].arguments, '{"city": "Köln"}');
    const followed = openai.responses.stream({ model, input: "hello" });
    assert.equal((await followed.finalResponse()).output_text, "Hello there.");
  },

  async "openai: errors are the client's own"() {
    await assert.rejects(
      openai.chat.completions.create({ model: "other", messages: said("hello") }),
      (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
    );
    await assert.rejects(
      openai.chat.completions.create({ model, messages: said("hello"), temperature: 9 }),
      (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
    );
    await assert.rejects(async () => {
      for await (const _ of await openai.chat.completions.create({ model, messages: said("break"), stream: true }));
    }, /went wrong/);
  },

  async "openai: an abort ends a stream"() {
    const stream = await openai.chat.completions.create({ model, messages: said("endless"), stream: true });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break; // breaks off the connection
    const controller = new AbortController();
    const waiting = openai.chat.completions.create({ model, messages: said("endless") }, { signal: controller.signal });
    setTimeout(() => controller.abort(), 50);
    await assert.rejects(waiting, OpenAI.APIUserAbortError);
  },

  async "anthropic: a message is answered"() {
    const message = await anthropic.messages.create({ model, max_tokens: 9, messages: said("hello") });
    assert.deepEqual([message.content[0].text, message.stop_reason], ["Hello there.", "end_turn"]);
    assert.equal(message.usage.input_tokens + message.usage.cache_read_input_tokens, 9);
  },

  async "anthropic: the client's own accumulator takes the stream"() {
    const stream = anthropic.messages.stream({ model, max_tokens: 9, messages: said("think") });
    let text = "";
    stream.on("text", (delta) => (text += delta));
    const final = await stream.finalMessage();
    assert.equal(text, "Hello there.");
    assert.deepEqual(final.content.map((block) => block.type), ["thinking", "text"]);
    assert.ok(final.content[0].signature);
    assert.equal(final.usage.output_tokens, 5);
  },

  async "anthropic: tools are called, and their results are read"() {
    const messages = said("tool");
    const first = await anthropic.messages.create({ model, max_tokens: 9, messages, tools });
    const call = first.content.at(-1);
    assert.deepEqual([first.stop_reason, call.input], ["tool_use", { city: "Köln" }]);
    const result = { type: "tool_result", tool_use_id: call.id, content: "rain" };
    messages.push({ role: "assistant", content: first.content }, { role: "user", content: [result] });
    const second = await anthropic.messages.stream({ model, max_tokens: 9, messages, tools }).finalMessage();
    assert.equal(second.content[0].text, "Hello there.");
  },

  async "anthropic: the tool runner runs its loop"() {
    const asked = [];
    const weather = {
      type: "custom",
      name: "weather",
      description: "The weather.",
      input_schema: parameters,
      parse: (input) => input,
      run: ({ city }) => (asked.push(city), "rain"),
    };
    const final = await anthropic.beta.messages.toolRunner({
      model,
      max_tokens: 9,
      messages: said("tool"),
      tools: [weather],
    });
    assert.equal(final.content[0].text, "Hello there.");
    assert.deepEqual(asked, ["Köln"]);
  },

  async "anthropic: errors are the client's own"() {
    await assert.rejects(
      anthropic.messages.create({ model: "other", max_tokens: 9, messages: said("hello") }),
      Anthropic.NotFoundError,
    );
    await assert.rejects(
      anthropic.messages.stream({ model, max_tokens: 9, messages: said("break") }).finalMessage(),
      /went wrong/,
    );
  },

  async "anthropic: an abort ends a stream"() {
    const stream = anthropic.messages.stream({ model, max_tokens: 9, messages: said("endless") });
    stream.on("text", () => stream.abort());
    await assert.rejects(stream.finalMessage(), Anthropic.APIUserAbortError);
  },
};

for (const [name, run] of Object.entries(suite)) {
  try {
    await run();
    console.log(`ok ${name}`);
  } catch (error) {
    console.error(`not ok ${name}\n${error.stack}`);
    process.exit(1);
  }
}
