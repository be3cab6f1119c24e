"""`forerun train lm` and `head` have the flags that they had when each was written twice, with the same defaults."""

from typing import Any

import pytest
import typer

from forerun.cli.train import app

LOOP = {
    **dict.fromkeys(("out", "init-from")),
    **dict.fromkeys(("resume", "quiet"), False),
    "warmup-steps": 50,
    "seed": 0,
    "validate-every-steps": 100,
    "checkpoint-every-s": 300.0,
}
FLAGS: dict[str, dict[str, Any]] = {
    "lm": {
        **LOOP,
        **dict.fromkeys(("kv-heads", "vocab-size", "teacher", "after", "tokenizer", "text", "ids", "samples")),
        "max-steps": 600,
        "tokens-per-step": 4096,
        "seq-len-tokens": 512,
        "lr": 2e-3,
        "decay-share": 0.4,
        "autocast": "auto",
        "hidden-size": 512,
        "layers": 6,
        "heads": 8,
        "ffn-size": 1536,
        "family": "llama",
        "experts": 0,
        "experts-per-token": 0,
        "loss": "ce",
        "samples-share": 0.5,
        "validation-windows": 16,
        "device": "cpu",
    },
    "head": {
        **LOOP,
        **dict.fromkeys(("lr", "method", "samples", "target", "num-tokens", "features")),
        **dict.fromkeys(("dtype", "ops"), "auto"),
        "max-steps": 1000,
        "tokens-per-step": 2048,
        "seq-len-tokens": 512,
        "decay-share": 0.6,
        "autocast": "off",
        "validation-rows": 8,
        "keep": False,
    },
    "drafter": {
        **dict.fromkeys(("out", "questions", "lr", "target")),
        **dict.fromkeys(("dtype", "ops"), "auto"),
        "hours": 4.0,
        "method": "eagle:draft_vocab=8192,steps=3",
        "batch-size": 16,
        "keep": True,
        "seed": 0,
        "quiet": False,
    },
    "sample": {
        **dict.fromkeys(("out", "target", "chat", "task", "text", "questions")),
        **dict.fromkeys(("passage-tokens", "question-tokens"), 160),
        **dict.fromkeys(("dtype", "ops"), "auto"),
        "num-tokens": 300_000,
        "batch-size": 32,
        "answer-tokens": 320,
        "seed": 0,
        "quiet": False,
    },
}
REQUIRED = {"lm": {"--out"}, "head": {"--out", "--method", "--samples"}, "drafter": {"--out"}, "sample": {"--out"}}


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags_of_a_command_and_their_defaults(name: str) -> None:
    group: Any = typer.main.get_command(app)
    params = group.commands[name].params
    assert {param.opts[0].removeprefix("--"): param.default for param in params} == FLAGS[name]
    assert {param.opts[0] for param in params if param.required} == REQUIRED[name]
    assert {param.opts[0] for param in params if param.multiple} <= {"--after", "--questions", "--text"}
    assert all(len(param.help) >= 10 for param in params)
