"""Clients of other projects, as their packages are, against a running server.

    python clients.py NAME URL MODEL

It runs in an environment that has the packages of one client, and neither forerun nor those of the others. Each
function is one client; the first line of its docstring is what `make clients` says was done, and what it returns is the
last answer. An answer that has the degrees in it shows that a tool was called, and that the model has read what it
gave.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

QUESTION = "What is the weather in Oslo?"
RESULT = "Done. Answer in words: it is sunny in Oslo, and 21 degrees."  # small models call again after less
DEGREES = "21"
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOL = {"type": "function", "function": WEATHER}
COMMAND = "Run the command `cat {}/weather.txt` with the tool {}, and say what it prints."
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 64}
CLI_S = 1700


def given(arguments: str | dict[str, Any]) -> str:
    """What the tool answers. Raises AssertionError where its arguments are not those of the question."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(values) == {"city"}, values
    assert "oslo" in values["city"].lower(), values
    return RESULT


def checked(answer: Any) -> str:
    """The answer, if the model has read what the tool gave."""
    assert DEGREES in str(answer), f"error: the answer has no {DEGREES}: {answer}"
    return str(answer)


def use_openai(url: str, model: str) -> str:
    """Chat completions streamed with a tool, a schema; responses streamed with a tool, and previous_response_id."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    asked = {"model": model, "tools": [TOOL], **GREEDY}
    chunks = client.chat.completions.create(messages=ASKED, tool_choice="required", stream=True, **asked)
    deltas = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    arguments = "".join(delta.function.arguments or "" for delta in deltas if delta.index == 0)
    named = {"name": deltas[0].function.name, "arguments": arguments}
    calls = [{"id": deltas[0].id, "type": "function", "function": named}]
    result = {"role": "tool", "tool_call_id": deltas[0].id, "content": given(arguments)}
    history = [*ASKED, {"role": "assistant", "content": None, "tool_calls": calls}, result]
    checked(client.chat.completions.create(messages=history, **asked).choices[0].message.content)

    form: Any = {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER, "strict": True}}
    counted = [{"role": "user", "content": "How many days has a week?"}]
    text = client.chat.completions.create(model=model, messages=counted, response_format=form, **GREEDY)
    assert isinstance(json.loads(text.choices[0].message.content)["n"], int)

    tools: Any = [{"type": "function", "strict": True, **WEATHER}]
    about = {"model": model, "tools": tools, "temperature": 0, "max_output_tokens": 64}
    with client.responses.stream(input=QUESTION, tool_choice="required", **about) as stream:
        response = stream.get_final_response()
    call = next(item for item in response.output if item.type == "function_call")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": given(call.arguments)}
    return checked(client.responses.create(input=[output], previous_response_id=response.id, **about).output_text)


def use_anthropic(url: str, model: str) -> str:
    """Messages streamed with a tool, its result, and a count of tokens."""
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none")
    tool: Any = {"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
    greedy = {"temperature": 0}  # which the client has no argument for any more
    asked: dict[str, Any] = {"model": model, "tools": [tool], "max_tokens": 64, "extra_body": greedy}
    with client.messages.stream(messages=ASKED, tool_choice={"type": "any"}, **asked) as stream:
        message = stream.get_final_message()
    use = next(block for block in message.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": given(use.input)}
    history: list[Any] = [*ASKED, {"role": "assistant", "content": message.content}]
    history.append({"role": "user", "content": [result]})
    assert client.messages.count_tokens(model=model, messages=history, tools=[tool]).input_tokens > 100
    return checked(client.messages.create(messages=history, **asked).content[0].text)


def use_ollama(url: str, model: str) -> str:
    """/api/chat with a tool, a schema, and a stream; /api/generate; the lists."""
    from ollama import Client

    client = Client(host=url)
    options = {"temperature": 0, "num_predict": 64}
    assert model in [one.model.removesuffix(":latest") for one in client.list().models]
    message = client.chat(model, ASKED, tools=[TOOL], options=options).message
    call = (message.tool_calls or [])[0].function
    result = {"role": "tool", "tool_name": call.name, "content": given(dict(call.arguments))}
    counted = [{"role": "user", "content": "How many days has a week?"}]
    number = client.chat(model, counted, format=NUMBER, options=options).message.content
    assert isinstance(json.loads(number)["n"], int)
    assert client.generate(model, "Say hello.", options={"num_predict": 8}).response
    chunks = client.chat(model, [*ASKED, message, result], tools=[TOOL], options=options, stream=True)
    return checked("".join(chunk.message.content or "" for chunk in chunks))


def use_litellm(url: str, model: str) -> str:
    """A tool, as openai/MODEL and as ollama_chat/MODEL."""
    import litellm

    for name, base in ((f"openai/{model}", f"{url}/v1"), (f"ollama_chat/{model}", url)):
        asked = {"model": name, "api_base": base, "api_key": "none", "tools": [TOOL], **GREEDY}
        message = litellm.completion(messages=ASKED, **asked).choices[0].message
        call = message.tool_calls[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": given(call.function.arguments)}
        answer = checked(litellm.completion(messages=[*ASKED, message, result], **asked).choices[0].message.content)
    return answer


def use_langchain(url: str, model: str) -> str:
    """A chat model with a bound tool, a stream, and structured output."""
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return given({"city": city})

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=64)
    bound = chat.bind_tools([weather])
    message = bound.invoke([HumanMessage(QUESTION)])
    history = [HumanMessage(QUESTION), message, weather.invoke(message.tool_calls[0])]
    found = chat.with_structured_output({"title": "Number", **NUMBER}, method="json_schema").invoke("Which is seven?")
    assert isinstance(found["n"], int)
    return checked("".join(str(chunk.content) for chunk in bound.stream(history)))


def use_pydantic_ai(url: str, model: str) -> str:
    """An agent that calls a tool by itself, and one whose answer is a type."""
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Person(BaseModel):
        name: str
        age: int

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings: Any = {"temperature": 0, "max_tokens": 64}
    agent = Agent(chat, model_settings=settings)

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return given({"city": city})

    typed = Agent(chat, output_type=Person, model_settings=settings)
    assert typed.run_sync("Ada is 36 years old.").output.age == 36
    return checked(agent.run_sync(QUESTION).output)


def use_openai_agents(url: str, model: str) -> str:
    """An agent over responses, and one over chat completions, that call a tool by themselves."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return given({"city": city})

    async def asked() -> str:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        settings, answer = ModelSettings(temperature=0, max_tokens=64), ""
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            made = kind(model, openai_client=client)
            agent = Agent(name="weather", tools=[weather], model=made, model_settings=settings)
            answer = checked((await Runner.run(agent, QUESTION, max_turns=4)).final_output)
        return answer

    return asyncio.run(asked())


def use_instructor(url: str, model: str) -> str:
    """A type as the answer, by a tool that must be called and by a schema."""
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    found = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
        messages = [{"role": "user", "content": "Ada is 36 years old."}]
        found.append(client.chat.completions.create(model=model, response_model=Person, messages=messages, **GREEDY))
    assert [(one.name, one.age) for one in found] == [("Ada", 36)] * 2, found
    return str(found)


def use_llm(url: str, model: str) -> str:
    """The command line, with a model of extra-openai-models.yaml and a function as tool."""
    with tempfile.TemporaryDirectory() as folder:
        about = f"- model_id: here\n  model_name: {model}\n  api_base: {url}/v1\n  supports_tools: true\n"
        (Path(folder) / "extra-openai-models.yaml").write_text(about, encoding="utf-8")
        function = f'def weather(city: str) -> str:\n    "The weather of a city."\n    return {RESULT!r}\n'
        command = [str(Path(sys.executable).with_name("llm")), "-m", "here", QUESTION, "--functions", function]
        command += ["-o", "temperature", "0", "-o", "max_tokens", "64", "--td", "--key", "none"]
        done = _run(command, env={"LLM_USER_PATH": folder})
    assert "Tool call: weather" in done.stderr, done.stderr
    return checked(done.stdout)


def use_lm_eval(url: str, model: str) -> str:
    """local-completions with the server's tokenizer: a small task by log-likelihoods, and one by texts."""
    lines = [
        {"text": "The capital of France is", "choices": [" Paris", " a potato"], "label": 0},
        {"text": "One, two, three,", "choices": [" banana", " four"], "label": 1},
        {"text": "def add(a, b):\n    return a", "choices": [" + b", " elephant"], "label": 0},
    ]
    common = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}", "target_delimiter": ""}
    chosen = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "label"}
    written = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["\n", ".", ","], "max_gen_toks": 4, "temperature": 0},
    }
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "tiny.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        kwargs = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        for name, form, metric in (("chosen", chosen, "acc"), ("written", written, "exact_match")):
            task = {"task": f"tiny_{name}", **common, **kwargs, **form, "metric_list": [{"metric": metric}]}
            (Path(folder) / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
        about = f"model={model},base_url={url}/v1/completions,tokenizer_backend=remote,num_concurrent=1,max_retries=1"
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", about]
        command += ["--tasks", "tiny_chosen,tiny_written", "--include_path", folder, "--output_path", f"{folder}/out"]
        done = _run(command, env={"HF_HOME": folder, "HF_HUB_OFFLINE": "1"})
        (results,) = Path(folder).rglob("results_*.json")
        found = json.loads(results.read_text(encoding="utf-8"))["results"]
    assert found["tiny_chosen"]["acc,none"] == 1.0, (found, done.stdout[-2000:])
    return str(found)


# ------------------------------------------------------------------------------------------------------------- node


def use_ai_sdk(url: str, model: str) -> str:
    """A tool that it runs by itself, over @ai-sdk/openai-compatible and over the responses of @ai-sdk/openai."""
    script = Path(__file__).with_name("ai_sdk.mjs").read_text(encoding="utf-8")
    place = _node() / "ai_sdk.mjs"  # beside the packages that it imports
    place.write_text(script, encoding="utf-8")
    return checked(_run(["node", str(place), url, model]).stdout)


def use_codex(url: str, model: str) -> str:
    """`codex exec` in an empty folder, which runs a command and says what it prints."""
    about = f'{{ name = "forerun", base_url = "{url}/v1", wire_api = "responses" }}'
    settings = [f"model_providers.here={about}", 'model_provider="here"', f'model="{model}"']
    flags = [flag for setting in settings for flag in ("-c", setting)]
    with _folder_with_a_file() as folder:
        home = _node() / "home"
        home.mkdir(exist_ok=True)
        command = [str(_node() / "node_modules/.bin/codex"), "exec", "--skip-git-repo-check", *flags]
        command += ["--sandbox", "read-only", "--json", COMMAND.format(folder, "exec_command")]
        done = _run(command, cwd=folder, env={"CODEX_HOME": str(home)})
    print(done.stdout, done.stderr, sep="\n")
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert any(item["type"] == "command_execution" for item in items), "error: it has run no command"
    return checked(next(item["text"] for item in reversed(items) if item["type"] == "agent_message"))


def use_opencode(url: str, model: str) -> str:
    """`opencode run` in an empty folder, which runs a command and says what it prints."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "forerun",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {model: {"name": model, "temperature": True, "limit": {"context": 32768, "output": 256}}},
    }
    about: dict[str, Any] = {"provider": {"here": provider}, "model": f"here/{model}"}
    about |= {"autoupdate": False, "share": "disabled", "agent": {"build": {"temperature": 0}}}
    about["permission"] = {"bash": {"*": "deny", "cat *": "allow"}, "edit": "deny", "webfetch": "deny"}
    with _folder_with_a_file() as folder:
        (Path(folder) / "opencode.json").write_text(json.dumps(about), encoding="utf-8")
        command = [str(_node() / "node_modules/.bin/opencode"), "run", "--format", "json"]
        command += [COMMAND.format(folder, "bash")]
        done = _run(command, cwd=folder, env={"HOME": f"{folder}/own", "XDG_DATA_HOME": f"{folder}/own/data"})
    print(done.stdout, done.stderr, sep="\n")
    parts = [json.loads(line)["part"] for line in done.stdout.splitlines() if line.startswith("{") and "part" in line]
    assert any(part["type"] == "tool" for part in parts), "error: it has run no command"
    return checked("".join(part["text"] for part in parts if part["type"] == "text"))


@contextmanager
def _folder_with_a_file() -> Iterator[str]:
    """A folder that an agent may look at."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "weather.txt").write_text(f"{RESULT}\n", encoding="utf-8")
        yield folder


def _node() -> Path:
    """The folder that has the packages of node."""
    return Path(os.environ["CLIENTS_NODE"])


def _run(command: list[str], cwd: str | None = None, env: dict[str, str] | None = None) -> Any:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **({} if cwd is None else {"PWD": cwd}), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CLI_S,
        check=False,
    )
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
        raise SystemExit(f"error: {Path(command[0]).name} has ended with {done.returncode}")
    return done


CLIENTS: dict[str, Callable[[str, str], str]] = {
    "openai": use_openai,
    "anthropic": use_anthropic,
    "ollama": use_ollama,
    "litellm": use_litellm,
    "langchain-openai": use_langchain,
    "pydantic-ai": use_pydantic_ai,
    "openai-agents": use_openai_agents,
    "instructor": use_instructor,
    "llm": use_llm,
    "lm-eval": use_lm_eval,
    "ai-sdk": use_ai_sdk,
    "codex": use_codex,
    "opencode": use_opencode,
}

if __name__ == "__main__":
    print(CLIENTS[sys.argv[1]](sys.argv[2], sys.argv[3]))
