// One tool loop per SDK: openai (Chat Completions, Responses), @anthropic-ai/sdk (Messages), ai (Chat Completions).
// Run by sdk_node.sh. Exit status 3: each SDK was told, in its own error type, that the context is too small.
import fs from "node:fs";
import path from "node:path";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { BASE_URL, MODEL, API_KEY, MODULES } = process.env;
const prompt = process.argv[2];
const MAX_TURNS = 5;
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

const openai = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: API_KEY, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: BASE_URL, apiKey: API_KEY, maxRetries: 0 });
const vercel = createOpenAICompatible({ name: "ds4", baseURL: `${BASE_URL}/v1`, apiKey: API_KEY });

const loops = {
  async chat() {
    const runner = openai.chat.completions.runTools({
      model: MODEL,
      stream: true,
      messages: [{ role: "user", content: prompt }],
      tools: each((name, { run, schema }) => ({
        type: "function",
        function: { name, description: name, parameters: schema, parse: JSON.parse, function: run },
      })),
    });
    runner.on("chunk", (chunk) => process.stdout.write(chunk.choices[0]?.delta?.reasoning_content ?? ""));
    return await runner.finalContent();
  },
  async responses() {
    const input = [{ role: "user", content: prompt }];
    for (let turn = 0; turn < MAX_TURNS; turn++) {
      const stream = openai.responses.stream({
        model: MODEL,
        input,
        reasoning: { summary: "auto" },
        store: false,
        tools: each((name, { schema }) => ({ type: "function", name, parameters: schema, strict: false })),
      });
      for await (const event of stream) {
        if (event.type === "response.reasoning_summary_text.delta") process.stdout.write(event.delta);
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
  async messages() {
    const messages = [{ role: "user", content: prompt }];
    for (let turn = 0; turn < MAX_TURNS; turn++) {
      const stream = anthropic.messages.stream({
        model: MODEL,
        max_tokens: 2048,
        thinking: { type: "enabled", budget_tokens: 1024 },
        messages,
        tools: each((name, { schema }) => ({ name, input_schema: schema })),
      });
      stream.on("thinking", (delta) => process.stdout.write(delta));
      const message = await stream.finalMessage();
      messages.push({ role: "assistant", content: message.content });
      const uses = message.content.filter((block) => block.type === "tool_use");
      if (!uses.length) return message.content.filter((b) => b.type === "text").map((b) => b.text).join("");
      messages.push({
        role: "user",
        content: uses.map((b) => ({ type: "tool_result", tool_use_id: b.id, content: tools[b.name].run(b.input) })),
      });
    }
    throw new Error("the loop does not end");
  },
  async vercel() {
    const result = ai.streamText({
      model: vercel(MODEL),
      prompt,
      maxRetries: 0,
      stopWhen: (ai.isStepCount ?? ai.stepCountIs)(MAX_TURNS),
      onError: () => {},
      tools: Object.fromEntries(each((name, { run, schema }) => [
        name,
        ai.tool({ description: name, inputSchema: ai.jsonSchema(schema), execute: async (args) => run(args) }),
      ])),
    });
    for await (const part of result.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "reasoning-delta") process.stdout.write(part.text);
    }
    return await result.text;
  },
};

let tooLong = 0;
for (const [name, loop] of Object.entries(loops)) {
  console.log(`${name} thinking:`);
  try {
    console.log(`\n${name} answer:`, await loop());
  } catch (error) {
    const status = error.status ?? error.statusCode;
    const why = `${error.code ?? ""} ${error.message} ${error.responseBody ?? ""}`;
    console.log(`${name} refused:`, status, why);
    if (status !== 400 || !/context_length_exceeded|prompt is too long/.test(why)) throw error;
    tooLong++;
    continue;
  }
  if (fs.readFileSync("hello.txt", "utf8") !== "hi") throw new Error(`${name} made a wrong file`);
  if (name !== "vercel") fs.unlinkSync("hello.txt");
}
process.exit(tooLong === 0 ? 0 : tooLong === Object.keys(loops).length ? 3 : 1);
