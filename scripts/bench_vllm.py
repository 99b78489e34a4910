#!/usr/bin/env python3
"""vLLM as one side of bench-engine: loads the model once, then measures whenever a line comes in, and answers each with a line of JSON.

It runs in vLLM's environment. The figures are those of `baton bench engine`: prompts of the same tokens, decode steps at the same context.
"""
import json
import os
import statistics
import sys
import time

# Of crates/bench/src/inference/measure.rs.
CONTEXT, STEPS = 64, 16
LONGEST = 2048


def prompt(seed, tokens, vocabulary):
    """The same tokens of no meaning as Baton's bench."""
    state, found = (seed * 2_654_435_761) % 2**32 | 1, []
    for _ in range(tokens):
        state = (state * 1_664_525 + 1_013_904_223) % 2**32
        found.append((state >> 8) % vocabulary)
    return {"prompt_token_ids": found}


class Side:
    def __init__(self, model):
        from vllm import LLM

        self.llm = LLM(
            model=model,
            dtype="bfloat16",
            # Every prompt is computed.
            enable_prefix_caching=False,
            max_model_len=LONGEST + 64,
            max_num_seqs=32,
            max_num_batched_tokens=int(os.environ.get("VLLM_BATCHED_TOKENS", LONGEST)),
            disable_log_stats=True,
        )
        self.vocabulary = self.llm.get_tokenizer().vocab_size
        self.measure(1)

    def seconds(self, prompts, tokens):
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        done = self.llm.generate(prompts, wanted, use_tqdm=False)
        took = time.perf_counter() - began
        assert all(len(one.outputs[0].token_ids) == tokens for one in done) and len(done) == len(prompts)
        return took

    def prefill(self, tokens, repeats):
        """Up to the first token: there is no way to ask for less."""
        prompts = [prompt(1, tokens, self.vocabulary)]
        return tokens / statistics.median(self.seconds(prompts, 1) for _ in range(repeats))

    def decode(self, sequences, repeats):
        """What the steps after the second token add. The first step is prefill; Baton's bench has one before it measures, too."""
        prompts = [prompt(seed, CONTEXT, self.vocabulary) for seed in range(sequences)]
        added = [self.seconds(prompts, 2 + STEPS) - self.seconds(prompts, 2) for _ in range(repeats)]
        return sequences * STEPS / statistics.median(added)

    def measure(self, repeats):
        figures = {f"prefill_{tokens}_tok_s": self.prefill(tokens, repeats) for tokens in (512, LONGEST)}
        return figures | {f"decode_{sequences}_tok_s": self.decode(sequences, repeats) for sequences in (1, 8, 32)}

    def write(self, text, tokens):
        from vllm import SamplingParams

        return self.llm.generate([text], SamplingParams(temperature=0.0, max_tokens=tokens), use_tqdm=False)[0].outputs[0].text


def main():
    # What vLLM itself prints goes to stderr: stdout is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = Side(sys.argv[1])

    def answer(value):
        print(json.dumps(value), file=answers, flush=True)

    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        answer({"text": side.write(request["text"], request["tokens"])} if "text" in request else side.measure(request["repeats"]))


if __name__ == "__main__":
    main()
