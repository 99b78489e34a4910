"""OpenAI's client and completions: openai_completions.py HOST:PORT."""

import openai

from common import address, openai_client, raises, run

client = openai_client(address())
MODEL = client.models.list().data[0].id
PROMPT = "The three primary colours are"


def complete(prompt=PROMPT, **options):
    # The end token has a log-probability, but no text.
    defaults = {"model": MODEL, "max_tokens": 8, "seed": 7, "extra_body": {"ignore_eos": True}}
    return client.completions.create(prompt=prompt, **{**defaults, **options})


def whole():
    answer = complete()
    assert answer.object == "text_completion" and answer.model == MODEL and answer.choices[0].text
    assert answer.choices[0].finish_reason == "length" and answer.id.endswith(answer._request_id)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert complete().choices[0].text == answer.choices[0].text


def stream():
    whole = complete()
    *before, last = complete(stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in before) == whole.choices[0].text
    assert before[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == [] and last.usage.total_tokens == whole.usage.total_tokens


def several_prompts_and_answers():
    prompts = [PROMPT, "One, two,"]
    texts = [complete(prompt, seed=seed).choices[0].text for prompt in prompts for seed in (7, 8)]
    several = complete(prompts, n=2)
    assert [choice.text for choice in several.choices] == texts and [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.usage.prompt_tokens == sum(complete(prompt).usage.prompt_tokens for prompt in prompts)
    streamed = ["", "", "", ""]
    for chunk in complete(prompts, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def log_probabilities():
    scored = complete(logprobs=3, temperature=0).choices[0]
    logprobs = scored.logprobs
    assert "".join(logprobs.tokens) == scored.text
    assert all(len(top) >= 3 and max(top.values()) == logprob for top, logprob in zip(logprobs.top_logprobs, logprobs.token_logprobs))
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)
    chunks = [chunk.choices[0].logprobs for chunk in complete(logprobs=3, temperature=0, stream=True)]
    assert [token for chunk in chunks if chunk for token in chunk.token_logprobs] == logprobs.token_logprobs


def echo():
    plain = complete()
    echoed = complete(echo=True, logprobs=2)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    logprobs = echoed.choices[0].logprobs
    assert "".join(logprobs.tokens) == echoed.choices[0].text and logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    scored = complete(echo=True, logprobs=0, max_tokens=0)
    assert scored.choices[0].text == PROMPT and scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[: scored.usage.prompt_tokens]


def best_of():
    each = [complete(seed=seed, logprobs=0).choices[0] for seed in (7, 8, 9)]
    mean = lambda choice: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)
    best = complete(n=2, best_of=3)
    assert [choice.text for choice in best.choices] == [choice.text for choice in sorted(each, key=mean, reverse=True)[:2]]
    assert best.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in each)


def errors():
    for param, options in {"best_of": {"n": 3, "best_of": 2}, "logprobs": {"logprobs": 21}, "suffix": {"suffix": "."}, "prompt": {"prompt": []}}.items():
        assert raises(openai.BadRequestError, lambda: complete(**options)).param == param
    assert raises(openai.NotFoundError, lambda: complete(model="davinci")).code == "model_not_found"


run(whole, stream, several_prompts_and_answers, log_probabilities, echo, best_of, errors)
