"""An option of vLLM, SGLang, llama.cpp, transformers or OpenVINO GenAI is answered with ours, in one sentence."""

import re
from typing import Any

import pytest
import typer
import typer.main

from forerun.cli import flags
from forerun.cli.elsewhere import on_command_line
from forerun.cli.main import app
from forerun.config import EngineConfig
from forerun.errors import BadOption
from forerun.registry import DOCUMENT, peer_options
from forerun.types import SamplingParams
from refusals import refusal

SEE = f"see {DOCUMENT}"
NO_SHARE = "memory is asked for in tokens, not as a share of the device (forerun plan shows the bytes)"
GGUF = "a GGUF file, or a folder with safetensors"
HUB = "a folder, or a hub id with the revision behind an @"


SENTENCES = {
    "generate x --max-model-len 512": f"vLLM's --max-model-len is --max-seq-len here: {SEE}",
    "generate x --max-model-len=512": f"vLLM's --max-model-len is --max-seq-len here: {SEE}",
    "generate x --max_model_len 512": f"vLLM's --max_model_len is --max-seq-len here: {SEE}",
    "bench latency --max-model-len 512": f"vLLM's --max-model-len is --max-seq-len of forerun generate here: {SEE}",
    "--max-model-len 512 generate x": f"vLLM's --max-model-len is --max-seq-len of forerun generate here: {SEE}",
    "generate --gpu-memory-utilization 0.9": f"vLLM's --gpu-memory-utilization is --kv-cache-tokens here: {NO_SHARE}; "
    + SEE,
    "generate x --ngram-prompt-lookup-max 4": "vLLM's --ngram-prompt-lookup-max is --draft lookup:max_n=N here: " + SEE,
    "generate x -tp 2": f"vLLM's -tp has no counterpart here: a model runs in one process on one device; {SEE}",
    "generate --tensor-parallel-size 2": "vLLM's and SGLang's --tensor-parallel-size has no counterpart here: "
    f"a model runs in one process on one device; {SEE}",
    "generate --revision main": "vLLM's, SGLang's and transformers' --revision is --target ORG/NAME@REVISION here: "
    f"{HUB}; {SEE}",
    "chat org/name --revision main": "vLLM's, SGLang's and transformers' --revision is the argument ORG/NAME@REVISION "
    f"here: {HUB}; {SEE}",
    "generate --speculative-num-steps 3": f"SGLang's --speculative-num-steps is --spec-length here: {SEE}",
    "generate --speculative-eagle-topk 4": "SGLang's --speculative-eagle-topk is --draft "
    f"tree:shape=best_first,draws=point,top_k=N here: of a draft model; eagle drafts chains; {SEE}",
    "generate --random-seed 1": "SGLang's --random-seed is --seed here: of a request; without one a seed is drawn and "
    f"shown; {SEE}",
    "generate -m model.gguf -md draft.gguf": f"llama.cpp's -m is --target here: {GGUF}; {SEE}",
    "generate x -md draft.gguf": f"llama.cpp's -md is --draft here: {GGUF}; {SEE}",
    "chat -m model.gguf": f"llama.cpp's -m is the argument TARGET here: {GGUF}; {SEE}",
    "generate x -n 64": f"llama.cpp's -n is --max-tokens here: tokens of the output, and -1 is not taken; {SEE}",
    "chat x -n 64": f"llama.cpp's -n is --max-tokens here: tokens of the output, and -1 is not taken; {SEE}",
    "generate x -ngl 99": "llama.cpp's -ngl is --device here: cuda takes the whole model and cpu none of it, "
    f"layers are not split; {SEE}",
    "generate -t 8 x": f"llama.cpp's -t has no counterpart here: set the variable FORERUN_NUM_THREADS; {SEE}",
    "generate -p hello": f"llama.cpp's -p is the argument PROMPTS here: {SEE}",
    "generate x -sys hello": f"llama.cpp's -sys is --system of forerun chat here: {SEE}",
    "generate x -cnv": f"llama.cpp's -cnv is forerun chat here: {SEE}",
    "generate x --draft-max 8": f"llama.cpp's --draft-max is --spec-length here: --draft names the drafter; {SEE}",
    "generate --model m": "vLLM's and SGLang's --model is --target here: a folder or a hub id; llama.cpp's --model is "
    f"--target here: {GGUF}; {SEE}",
    "generate x --max-new-tokens 9": "SGLang's, transformers' and OpenVINO GenAI's --max-new-tokens is --max-tokens "
    f"here: {SEE}",
    "generate --prompt-lookup-num-tokens 3": "transformers' --prompt-lookup-num-tokens is --draft lookup and "
    f"--spec-length here: {SEE}",
    "generate x --num-beam-groups 4": "transformers' and OpenVINO GenAI's --num-beam-groups has no counterpart here: "
    f"a beam search has one group; {SEE}",
    "generate x --rng-seed 1": "OpenVINO GenAI's --rng-seed is --seed here: without one a seed is drawn and shown; "
    + SEE,
}


@pytest.mark.parametrize("line", SENTENCES)
def test_the_sentence(refused: Any, line: str) -> None:
    assert refused(*line.split()) == SENTENCES[line]


@pytest.mark.parametrize("line", ["generate x --max-model-len 512", "generate x -ngl 99"])
def test_the_same_from_a_shell(process: Any, line: str) -> None:
    done = process(*line.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {SENTENCES[line]}\n")


OTHER_MISTAKES = {
    "generate x --temprature 1": "No such option: --temprature (Possible options: ",
    "generate x -n5": "No such option: -n: see forerun generate --help",  # no short flag takes its value like that
    "generate x --chat-template": "Option '--chat-template' requires an argument",
    "generate x --top-k many": "Invalid value for '--top-k'",
    "drafters lookup more": "Got unexpected extra argument",
}


@pytest.mark.parametrize("line", OTHER_MISTAKES)
def test_other_mistakes_keep_their_words(refused: Any, line: str) -> None:
    assert refused(*line.split()).startswith(OTHER_MISTAKES[line])


# ------------------------------------------------------------------------------------------- a flag of another command


@pytest.mark.parametrize("line", ["chat {} nowhere", "chat {}=nowhere", "serve {} nowhere", "tune {}=nowhere"])
def test_the_target_is_an_argument_or_an_option(refused: Any, line: str) -> None:
    """As other commands teach it: the sentence is that of a folder, and not of an option."""
    plainly = line.replace("{}=", "").replace("{} ", "")
    assert refused(*line.format("--target").split()) == refused(*plainly.split())
    assert "there is no folder nowhere" in refused(*plainly.split())


OF_ANOTHER = {
    "chat t --ops reference": "--ops is an option of forerun generate, not of forerun chat: set FORERUN_OPS or use "
    "--config",
    "chat t --kv_cache_backend=paged": "--kv_cache_backend is an option of forerun generate, not of forerun chat: set "
    "FORERUN_KV_CACHE_BACKEND or use --config",
    "demo --chat-template f": "--chat-template is an option of forerun generate, not of forerun demo: set "
    "FORERUN_CHAT_TEMPLATE or use --config",
    "quantize --config f": "--config is an option of forerun generate, not of forerun quantize: set FORERUN_CONFIG",
    "chat --logprobs 3": "--logprobs is an option of forerun generate, not of forerun chat: leave it out or use "
    "forerun generate",
    "generate x --system s": "--system is an option of forerun chat, not of forerun generate: leave it out or use "
    "forerun chat",
    "drafters --ops reference": "--ops is an option of forerun generate, not of forerun drafters: leave it out or use "
    "forerun generate",
    "train lm --generation-config model": "--generation-config is an option of forerun generate, not of forerun train "
    "lm: leave it out or use forerun generate",
    "--ops reference generate x": "--ops is an option of forerun generate, not of forerun: write it behind generate",
    "bench --ops reference latency": "--ops is an option of forerun bench latency, not of forerun bench: write it "
    "behind latency",
    "generate --version": "--version is an option of forerun, not of forerun generate: leave it out or use forerun",
    "generate x --loss kl": "--loss is an option of forerun train lm, not of forerun generate: leave it out or use "
    "forerun train lm",
    "generate x --port 1": "--port is an option of forerun serve, not of forerun generate: leave it out or use "
    "forerun serve",
    "generate x --served-model-name s": "--served-model-name is an option of forerun batch, not of forerun generate: "
    "leave it out or use forerun batch",
    "bench latency --out f": "--out is an option of forerun tune, not of forerun bench latency: use --json FILE, which "
    "writes what was measured",
    "generate x --out f": "--out is an option of forerun tune, not of forerun generate: leave it out or use forerun "
    "tune",
    # What is of training alone, and a peer's, is the peer's.
    "generate x --tokenizer t": "vLLM's --tokenizer has no counterpart here: the tokenizer is tokenizer.json beside "
    f"the weights; {SEE}",
}


@pytest.mark.parametrize("line", OF_ANOTHER)
def test_a_flag_of_another_command(refused: Any, line: str) -> None:
    assert refused(*line.split()) == OF_ANOTHER[line]


def test_the_variable_that_is_named_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag of the engine that `forerun chat` and `forerun demo` have not."""
    words = {
        "ops": "reference",
        "kv_cache_backend": "contiguous",
        "kv_cache_dtype": "bfloat16",
        "generation_config": "model",
        "prefill_stretch": "32.0",
        "max_itl_ms": "32.0",
    }
    words["prefix_caching"] = words["calibrate"] = "False"
    for command in ("chat", "demo"):
        missing = FLAGS["generate"].keys() - {p.name for p in ROOT.commands[command].params}
        for name in missing & EngineConfig.__dataclass_fields__.keys():
            variable, value = f"FORERUN_{name.upper()}", words.get(name, "32")
            assert f": set {variable}" in parsed(command, FLAGS["generate"][name], "1")
            monkeypatch.setenv(variable, value)
            assert str(getattr(flags.engine_config({}), name)) == value


# ----------------------------------------------------------------------------------------------------- the whole table

ROOT: Any = typer.main.get_command(app)
FLAGS = {
    command: {p.name: p.opts[0] for p in ROOT.commands[command].params}
    for command in ("generate", "chat", "batch", "serve")
}
SPELLINGS = [(row, spelling) for row in peer_options() for spelling in row.theirs]


def as_flag(spelling: str) -> str:
    return spelling if spelling.startswith("-") else f"--{spelling.replace('_', '-')}"


# On the command that has nearly every option, and, for a part of them, on one that has none. What is called the same
# here is the matter of test_a_flag_of_another_command.
ON_COMMANDS = [
    (row, as_flag(spelling), command)
    for row, spelling in SPELLINGS
    for command in ("generate", "drafters")
    if as_flag(spelling) not in {flag for command in ("generate", "batch", "serve") for flag in FLAGS[command].values()}
    and as_flag(spelling) != "--draft-model"  # another spelling of --draft, which works
    and (command == "generate" or (row.ours and spelling == row.theirs[0]))
]


def test_the_draft_has_the_name_that_other_engines_give_it() -> None:
    (draft,) = (option for option in ROOT.commands["generate"].params if option.name == "draft")
    assert draft.opts == ["--draft", "--draft-model"]


def parsed(*words: str) -> str:
    """What `main` says to words that cannot be parsed; the commands are built once, which takes most of its time."""
    with pytest.raises(typer.BadParameter.__mro__[2]) as error:
        ROOT(words, prog_name="forerun", standalone_mode=False)
    usage: Any = error.value
    return on_command_line(words, usage.option_name, usage.ctx) or "no answer"


def ours_on(command: str, entry: str) -> str:
    """How an entry of `ours` is written on a command that has it, or on one that has nothing."""
    name, _, value = entry.partition("=")
    if entry.startswith(("forerun ", "LLM.")):
        return entry
    home = "chat" if name == "system" else "generate"
    text = "the argument PROMPTS" if name == "prompt" else f"{FLAGS[home][name]} {value}".strip()
    return text if home == command else f"{text} of forerun {home}"


def test_every_spelling_is_answered_with_its_row() -> None:
    assert len(ON_COMMANDS) > 400
    for row, flag, command in ON_COMMANDS:
        said = parsed(command, flag, "1")
        answer = f"{flag} has no counterpart here"
        if row.ours:
            texts = [ours_on(command, entry) for entry in row.ours]
            *most, last = [text.removesuffix(" of forerun generate") for text in texts]
            home = " of forerun generate" if texts[0].endswith(" of forerun generate") else ""
            answer = f"{flag} is {', '.join(most)}{' and ' if most else ''}{last}{home} here"
        answer += f": {row.note}" if row.note else ""
        assert re.search(rf"{re.escape(row.peer)}'s?[^;:]* {re.escape(answer)}[;:] ", said), said
        assert said.endswith(SEE)


# -------------------------------------------------------------------------------------- Python, TOML, variables, .jsonl

KEYWORDS = {
    "max_model_len": f"vLLM's max_model_len is max_seq_len here: {SEE}",
    "tensor_parallel_size": "vLLM's and SGLang's tensor_parallel_size has no counterpart here: a model runs in one "
    f"process on one device; {SEE}",
    "num_assistant_tokens": f"transformers' and OpenVINO GenAI's num_assistant_tokens is spec_length here: {SEE}",
    "prompt_lookup": f'OpenVINO GenAI\'s prompt_lookup is draft="lookup" here: {SEE}',
    "do_sample": "transformers' and OpenVINO GenAI's do_sample is temperature of SamplingParams here: 0 is greedy "
    f"(do_sample=False), above 0 draws; {SEE}",
    "scheduler_config": "OpenVINO GenAI's scheduler_config is kv_cache_tokens, max_batch_size and prefill_chunk_tokens "
    f"here: options of the engine itself; {SEE}",
    "streamer": f"transformers' streamer is LLM.stream here: {SEE}",
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_keyword_of_the_engine(name: str) -> None:
    assert refusal(BadOption, EngineConfig.make, **{name: 1}) == KEYWORDS[name]


def test_every_spelling_is_answered_as_a_keyword() -> None:
    names = {spelling.lstrip("-").replace("-", "_") for _, spelling in SPELLINGS if not re.match(r"-\w", spelling)}
    aliases = {"draft_model", "num_speculative_tokens", "speculative_config"}  # they work
    fields = EngineConfig.__dataclass_fields__.keys()
    for name in names - aliases - fields:
        answer = rf" {name} (is .* here|has no counterpart here: ).*{SEE}$"
        of_requests = rf"give it with each request: .*, or as {name} in a body$"  # the same name here, only elsewhere
        with pytest.raises(BadOption, match=of_requests if name in SamplingParams.__dataclass_fields__ else answer):
            EngineConfig.make(**{name: 1})
    same = {"quantization", "generation_config", "chat_template", "max_num_batched_tokens", "kv_cache_dtype"}
    assert names & fields == same


def test_a_key_of_speculative_config() -> None:
    config = {"model": "d", "rejection_sample_method": "block"}
    assert refusal(BadOption, EngineConfig.make, speculative_config=config) == (
        "vLLM's rejection_sample_method is acceptance of SamplingParams here: standard is ratio, block is block; "
        f"synthetic is not there; {SEE}"
    )


def test_a_key_of_the_config_file(written: Any, refused: Any) -> None:
    file = written('max-model-len = 512\ndraft = "none"\n', "forerun.toml")
    there = f"vLLM's max-model-len is max_seq_len here: {SEE}"
    assert refused("generate", "x", "--config", file) == f"the config file {file!r}: {there}"


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ("FORERUN_MAX_MODEL_LEN", f"vLLM's max_model_len is FORERUN_MAX_SEQ_LEN here: {SEE}"),
        ("FORERUN_PROMPT_LOOKUP", f"OpenVINO GenAI's prompt_lookup is FORERUN_DRAFT=lookup here: {SEE}"),
        (
            "FORERUN_STOP_STRINGS",
            "transformers' and OpenVINO GenAI's stop_strings is stop of SamplingParams here: the text is cut from the "
            f"output; {SEE}",
        ),
    ],
)
def test_a_variable(refused: Any, variable: str, sentence: str) -> None:
    assert refused("generate", "x", **{variable: "512"}) == f"there is no {variable}: {sentence}"


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ("max_completion_tokens", f"the OpenAI API's max_completion_tokens is max_tokens here: {SEE}"),
        ("max_model_len", f"vLLM's max_model_len is max_seq_len of LLM here: {SEE}"),
        ("text", f"SGLang's text is prompt here: a text or ids; {SEE}"),
        ("prompt_lookup", f'OpenVINO GenAI\'s prompt_lookup is draft="lookup" here: {SEE}'),
    ],
)
def test_a_field_of_a_request(field: str, sentence: str) -> None:
    said = refusal(BadOption, flags.requests, f'{{"prompt": "a", "{field}": 3}}', SamplingParams())
    assert said == f"line 1: {sentence}"


def test_the_aliases_still_work() -> None:
    given = EngineConfig.make(speculative_config={"method": "lookup", "num_speculative_tokens": 3})
    assert given == EngineConfig.make(draft_model="lookup", num_speculative_tokens=3)
    assert given == EngineConfig.make(draft="lookup", spec_length=3)
