"""`forerun train lm` and `head` have the flags that they had when each was written twice, with the same defaults."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from forerun.cli.train import app

LOOP = {
    "out": None,
    "warmup-steps": 50,
    "seed": 0,
    "validate-every-steps": 100,
    "checkpoint-every-s": 300.0,
    "init-from": None,
    "resume": False,
    "quiet": False,
}
FLAGS: dict[str, dict[str, Any]] = {
    "lm": {
        **LOOP,
        "max-steps": 600,
        "tokens-per-step": 4096,
        "seq-len-tokens": 512,
        "lr": 2e-3,
        "decay-share": 0.4,
        "autocast": "auto",
        "hidden-size": 512,
        "layers": 6,
        "heads": 8,
        "kv-heads": None,
        "ffn-size": 1536,
        "family": "llama",
        "experts": 0,
        "experts-per-token": 0,
        "vocab-size": None,
        "loss": "ce",
        "teacher": None,
        "after": None,
        "tokenizer": None,
        "text": None,
        "ids": None,
        "samples": None,
        "samples-share": 0.5,
        "validation-windows": 16,
        "device": "cpu",
    },
    "head": {
        **LOOP,
        "max-steps": 1000,
        "tokens-per-step": 2048,
        "seq-len-tokens": 512,
        "lr": None,
        "decay-share": 0.6,
        "autocast": "off",
        "method": None,
        "samples": None,
        "target": None,
        "num-tokens": None,
        "features": None,
        "validation-rows": 8,
        "keep": False,
        "dtype": "auto",
        "ops": "auto",
    },
    "drafter": {
        "out": None,
        "hours": 4.0,
        "questions": None,
        "method": "eagle:draft_vocab=8192,steps=3",
        "lr": None,
        "batch-size": 16,
        "keep": True,
        "seed": 0,
        "target": None,
        "dtype": "auto",
        "ops": "auto",
        "quiet": False,
    },
    "sample": {
        "out": None,
        "target": None,
        "num-tokens": 300_000,
        "batch-size": 32,
        "chat": None,
        "task": None,
        "passage-tokens": 160,
        "question-tokens": 160,
        "answer-tokens": 320,
        "text": None,
        "questions": None,
        "dtype": "auto",
        "ops": "auto",
        "seed": 0,
        "quiet": False,
    },
}
REQUIRED = {"lm": {"--out"}, "head": {"--out", "--method", "--samples"}, "drafter": {"--out"}, "sample": {"--out"}}


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags_of_a_command_and_their_defaults(name: str) -> None:
    group: Any = typer.main.get_command(app)
    params = group.commands[name].params
    assert {param.opts[0]: param.default for param in params} == {f"--{k}": v for k, v in FLAGS[name].items()}
    assert {param.opts[0] for param in params if param.required} == REQUIRED[name]
    assert {param.opts[0] for param in params if param.multiple} <= {"--after", "--questions", "--text"}
    assert all(len(param.help) >= 10 for param in params)
