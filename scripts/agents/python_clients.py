"""Clients from PyPI on a task of three calls of a tool. Usage: python_clients.py CLIENT BASE MODEL

Prints JSON: what the tool was asked, in order, and the last answer.
"""

import asyncio
import json
import os
import sys

os.environ.update(
    OPENAI_API_KEY="dummy",
    ANTHROPIC_API_KEY="dummy",
    OPENAI_AGENTS_DISABLE_TRACING="1",
    LANGCHAIN_TRACING_V2="false",
    LITELLM_TELEMETRY="False",
)

TASK = "Tell me how warm it is in Oslo, Rome and Lima."
DEGREES = {"Oslo": "4", "Rome": "21", "Lima": "18"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# A model that cannot do the task goes round; a client stops it.
MAX_TURNS = 8


def temperature(asked, city):
    asked.append(city)
    return DEGREES.get(city, "unknown")


def langchain(model, asked):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def weather(city: str) -> str:
        """Degrees in a city."""
        return temperature(asked, city)

    model = model.bind_tools([weather])
    messages = [HumanMessage(TASK)]
    for _ in range(MAX_TURNS):
        # A streamed answer is the sum of its chunks.
        chunks = list(model.stream(messages))
        answer = sum(chunks[1:], chunks[0])
        messages.append(answer)
        if not answer.tool_calls:
            break
        messages += [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    return str(answer.text)


def langchain_openai(base, model, asked, use_responses_api):
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model=model, base_url=f"{base}/v1", max_retries=0, max_tokens=256, use_responses_api=use_responses_api
    )
    return langchain(chat, asked)


def langchain_anthropic(base, model, asked):
    from langchain_anthropic import ChatAnthropic

    return langchain(ChatAnthropic(model=model, base_url=base, max_retries=0, max_tokens=256), asked)


def openai_agents(base, model, asked, kind, streams):
    from agents import Agent, ModelSettings, Runner, function_tool
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel
    from openai import AsyncOpenAI

    @function_tool
    def weather(city: str) -> str:
        """Degrees in a city."""
        return temperature(asked, city)

    client = AsyncOpenAI(base_url=f"{base}/v1", max_retries=0)
    served = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[kind](
        model=model, openai_client=client
    )
    settings = ModelSettings(max_tokens=256)
    agent = Agent(name="a", instructions="Be brief.", tools=[weather], model=served, model_settings=settings)

    async def run():
        if not streams:
            return (await Runner.run(agent, TASK, max_turns=MAX_TURNS)).final_output
        streamed = Runner.run_streamed(agent, TASK, max_turns=MAX_TURNS)
        async for _ in streamed.stream_events():
            pass
        return streamed.final_output

    return asyncio.run(run())


def pydantic_ai(base, model, asked, kind):
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if kind == "messages":
        served = AnthropicModel(model, provider=AnthropicProvider(base_url=base, api_key="dummy"))
    else:
        openai = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[kind]
        served = openai(model, provider=OpenAIProvider(base_url=f"{base}/v1", api_key="dummy"))
    agent = Agent(served, system_prompt="Be brief.", model_settings={"max_tokens": 256})

    @agent.tool_plain
    def weather(city: str) -> str:
        """Degrees in a city."""
        return temperature(asked, city)

    async def run():
        async with agent.run_stream(TASK) as streamed:
            return await streamed.get_output()

    return asyncio.run(run())


def instructor(base, model, asked, mode):
    """Three objects of a type, one after the other."""
    from instructor import Mode, from_openai
    from openai import OpenAI
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    client = from_openai(OpenAI(base_url=f"{base}/v1", max_retries=0), mode=Mode[mode])
    for index in range(3):
        # The mock counts turns of the assistant.
        earlier = [message for city in asked for message in ({"role": "assistant", "content": city}, user("Next."))]
        made = client.chat.completions.create(
            model=model,
            response_model=Weather,
            messages=[user(TASK), *earlier],
            max_retries=0,
            max_tokens=256,
        )
        temperature(asked, made.city)
    return f"{index + 1} objects"


def user(text):
    return {"role": "user", "content": text}


def litellm_turns(ask, asked):
    messages = [user(TASK)]
    for _ in range(MAX_TURNS):
        answer = ask(messages)
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            said = temperature(asked, json.loads(call.function.arguments).get("city"))
            messages.append({"role": "tool", "tool_call_id": call.id, "name": "weather", "content": said})
    return answer.content


TOOL = {"type": "function", "function": {"name": "weather", "description": "Degrees", "parameters": PARAMETERS}}


def litellm(base, model, asked, provider):
    import litellm as library

    library.telemetry = False
    api_base = base if provider == "anthropic" else f"{base}/v1"

    def ask(messages):
        answer = library.completion(
            model=f"{provider}/{model}",
            messages=messages,
            tools=[TOOL],
            api_base=api_base,
            api_key="dummy",
            max_tokens=256,
            max_retries=0,
        )
        return answer.choices[0].message

    return litellm_turns(ask, asked)


def litellm_proxy(base, model, asked, route):
    """litellm's proxy is at `base`; official clients ask it."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{base}/v1", api_key=os.environ["PROXY_KEY"], max_retries=0)

    def ask(messages):
        answer = client.chat.completions.create(model=route, messages=messages, tools=[TOOL], max_tokens=256)
        return answer.choices[0].message

    return litellm_turns(ask, asked)


CLIENTS = {
    "langchain-openai chat": lambda *to: langchain_openai(*to, use_responses_api=False),
    "langchain-openai responses": lambda *to: langchain_openai(*to, use_responses_api=True),
    "langchain-anthropic": langchain_anthropic,
    "openai-agents chat": lambda *to: openai_agents(*to, "chat", streams=False),
    "openai-agents chat stream": lambda *to: openai_agents(*to, "chat", streams=True),
    "openai-agents responses": lambda *to: openai_agents(*to, "responses", streams=False),
    "openai-agents responses stream": lambda *to: openai_agents(*to, "responses", streams=True),
    "pydantic-ai chat": lambda *to: pydantic_ai(*to, "chat"),
    "pydantic-ai responses": lambda *to: pydantic_ai(*to, "responses"),
    "pydantic-ai messages": lambda *to: pydantic_ai(*to, "messages"),
    "instructor TOOLS": lambda *to: instructor(*to, "TOOLS"),
    "instructor JSON_SCHEMA": lambda *to: instructor(*to, "JSON_SCHEMA"),
    "litellm openai": lambda *to: litellm(*to, "openai"),
    "litellm hosted_vllm": lambda *to: litellm(*to, "hosted_vllm"),
    "litellm anthropic": lambda *to: litellm(*to, "anthropic"),
    "litellm-proxy hosted_vllm": lambda *to: litellm_proxy(*to, "over-chat"),
    "litellm-proxy anthropic": lambda *to: litellm_proxy(*to, "over-messages"),
}


def main():
    client, base, model = sys.argv[1:]
    asked = []
    answer = CLIENTS[client](base, model, asked)
    print(json.dumps({"asked": asked, "answer": answer}))


if __name__ == "__main__":
    main()
