// The Node SDKs: openai (Chat Completions, Responses), @anthropic-ai/sdk (Messages), ai (Chat Completions).
// Run by sdk_node.sh. TURN and the exit status mean what they mean in sdk.py.
import fs from "node:fs";
import path from "node:path";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { BASE_URL, MODEL, API_KEY, MODULES, TURN, OUTPUT, COUNT } = process.env;
const prompt = process.argv[2];
const MAX_TURNS = 5;
const TOO_LONG = 3;
const BEGUN = 10; // events of a stream after which some of the answer has come
const { resolve } = createRequire(path.join(MODULES, "none.js"));
const load = (name) => import(pathToFileURL(resolve(name)).href);
const { default: OpenAI } = await load("openai");
const { default: Anthropic } = await load("@anthropic-ai/sdk");
const ai = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const text = { type: "string" };
const tools = {
  list_dir: {
    run: ({ path }) => fs.readdirSync(path).sort().join("\n"),
    schema: { type: "object", properties: { path: text }, required: ["path"] },
  },
  write_file: {
    run: ({ path, content }) => (fs.writeFileSync(path, content), "written"),
    schema: { type: "object", properties: { path: text, content: text }, required: ["path", "content"] },
  },
};
const each = (make) => Object.entries(tools).map(([name, tool]) => make(name, tool));
const show = (text) => process.stdout.write(text);

const openai = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: API_KEY, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: BASE_URL, apiKey: API_KEY, maxRetries: 0 });
const vercel = createOpenAICompatible({ name: "ds4", baseURL: `${BASE_URL}/v1`, apiKey: API_KEY });

// Per dialect: answer(question, withTools) is the text that ends the turn; begin(question) resolves after BEGUN events
// with what aborts the stream.
const begun = (stream, event) => {
  stream.done().catch(() => {});
  let seen = 0;
  return new Promise((done) => stream.on(event, () => ++seen === BEGUN && done(() => stream.abort())));
};
const chat = {
  declared: each((name, { run, schema }) => ({
    type: "function",
    function: { name, description: name, parameters: schema, parse: JSON.parse, function: run },
  })),
  run(question, withTools) {
    const request = { model: MODEL, stream: true, messages: [{ role: "user", content: question }] };
    return withTools
      ? openai.chat.completions.runTools({ ...request, tools: this.declared })
      : openai.chat.completions.stream(request);
  },
  async answer(question, withTools) {
    const runner = this.run(question, withTools);
    runner.on("chunk", (chunk) => show(chunk.choices[0]?.delta?.reasoning_content ?? ""));
    return await runner.finalContent();
  },
  begin(question) {
    return begun(this.run(question, true), "chunk");
  },
};

const responses = {
  stream(input, withTools = true) {
    return openai.responses.stream({
      model: MODEL,
      input,
      reasoning: { summary: "auto" },
      store: false,
      tools: withTools
        ? each((name, { schema }) => ({ type: "function", name, parameters: schema, strict: false }))
        : [],
    });
  },
  async answer(question, withTools) {
    const input = [{ role: "user", content: question }];
    for (let turn = 0; turn < MAX_TURNS; turn++) {
      const stream = this.stream(input, withTools);
      for await (const event of stream) {
        if (event.type === "response.reasoning_summary_text.delta") show(event.delta);
      }
      const response = await stream.finalResponse();
      const calls = response.output.filter((item) => item.type === "function_call");
      if (!calls.length) return response.output_text;
      input.push(...response.output);
      for (const call of calls) {
        const output = tools[call.name].run(JSON.parse(call.arguments));
        input.push({ type: "function_call_output", call_id: call.call_id, output });
      }
    }
    throw new Error("the loop does not end");
  },
  begin(question) {
    return begun(this.stream([{ role: "user", content: question }]), "event");
  },
};

const messages = {
  stream(turns, withTools = true) {
    return anthropic.messages.stream({
      model: MODEL,
      max_tokens: Number(OUTPUT),
      thinking: { type: "enabled", budget_tokens: 1024 },
      messages: turns,
      ...(withTools && { tools: each((name, { schema }) => ({ name, input_schema: schema })) }),
    });
  },
  async answer(question, withTools) {
    const turns = [{ role: "user", content: question }];
    for (let turn = 0; turn < MAX_TURNS; turn++) {
      const stream = this.stream(turns, withTools);
      stream.on("thinking", show);
      const message = await stream.finalMessage();
      turns.push({ role: "assistant", content: message.content });
      const uses = message.content.filter((block) => block.type === "tool_use");
      if (!uses.length) return message.content.filter((b) => b.type === "text").map((b) => b.text).join("");
      turns.push({
        role: "user",
        content: uses.map((b) => ({ type: "tool_result", tool_use_id: b.id, content: tools[b.name].run(b.input) })),
      });
    }
    throw new Error("the loop does not end");
  },
  begin(question) {
    return begun(this.stream([{ role: "user", content: question }]), "streamEvent");
  },
};

const sdk = {
  stream(question, withTools, abortSignal) {
    return ai.streamText({
      model: vercel(MODEL),
      prompt: question,
      maxRetries: 0,
      abortSignal,
      stopWhen: (ai.isStepCount ?? ai.stepCountIs)(MAX_TURNS),
      onError: () => {},
      ...(withTools && {
        tools: Object.fromEntries(each((name, { run, schema }) => [
          name,
          ai.tool({ description: name, inputSchema: ai.jsonSchema(schema), execute: async (args) => run(args) }),
        ])),
      }),
    });
  },
  async answer(question, withTools) {
    const result = this.stream(question, withTools);
    for await (const part of result.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "reasoning-delta") show(part.text);
    }
    return await result.text;
  },
  async begin(question) {
    const controller = new AbortController();
    let seen = 0;
    for await (const _ of this.stream(question, true, controller.signal).fullStream) if (++seen === BEGUN) break;
    return () => controller.abort();
  },
};

const dialects = Object.entries({ chat, responses, messages, vercel: sdk });
let refused = 0;
for (const [name, dialect] of dialects) {
  if (TURN === "cancel") {
    (await dialect.begin(COUNT))();
    console.log(`${name} cancelled`);
  }
  console.log(`${name} thinking:`);
  let answer;
  try {
    answer = await dialect.answer(prompt, TURN !== "plain");
  } catch (error) {
    const status = error.status ?? error.statusCode;
    const why = `${error.code ?? ""} ${error.message} ${error.responseBody ?? ""}`;
    if (status !== 400 || !/context_length_exceeded|prompt is too long/.test(why)) throw error;
    console.log(`${name} refused:`, status, why);
    refused++;
    continue;
  }
  if (!answer?.trim()) throw new Error(`${name} has no answer`);
  console.log(`\n${name} answer:`, answer);
  if (TURN !== "plain") {
    if (fs.readFileSync("hello.txt", "utf8") !== "hi") throw new Error(`${name} made a wrong file`);
    if (dialect !== dialects.at(-1)[1]) fs.unlinkSync("hello.txt");
  }
}
process.exit(refused === 0 ? 0 : refused === dialects.length ? TOO_LONG : 1);
