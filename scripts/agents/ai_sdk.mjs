// Vercel's AI SDK on a task of three calls of a tool. Usage: ai_sdk.mjs PROVIDER BASE MODEL
// Prints JSON: what the tool was asked, in order, and the last answer.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [provider, base, name] = process.argv.slice(2);
const settings = { baseURL: `${base}/v1`, apiKey: 'dummy' };
const openai = createOpenAI(settings);
const model = {
  responses: () => openai(name),
  chat: () => openai.chat(name),
  anthropic: () => createAnthropic(settings)(name),
  compatible: () => createOpenAICompatible({ name: 'baton', ...settings })(name),
}[provider]();

const degrees = { Oslo: '4', Rome: '21', Lima: '18' };
const asked = [];
const weather = tool({
  description: 'Degrees in a city.',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    asked.push(city);
    return degrees[city] ?? 'unknown';
  },
});
const call = { model, tools: { weather }, stopWhen: stepCountIs(8), maxOutputTokens: 256, maxRetries: 0 };
let failure;
const streamed = streamText({
  ...call,
  prompt: 'Tell me how warm it is in Oslo, Rome and Lima.',
  onError: ({ error }) => { failure = error; },
});
let answer = '';
for await (const piece of streamed.textStream) answer += piece;
if (failure) throw failure;
// The next turn has the items of this one; of responses it refers to them.
const messages = [
  { role: 'user', content: 'Tell me how warm it is in Oslo, Rome and Lima.' },
  ...(await streamed.response).messages,
  { role: 'user', content: 'And once more?' },
];
const before = asked.length;
await generateText({ ...call, messages, stopWhen: stepCountIs(1) });
console.log(JSON.stringify({ asked: asked.slice(0, before), answer }));
