"""Lists of methods (`forerun drafters` and others), `demo`, `bench widen` and `bench latency` on tiny checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun import registry
from forerun.cli.demo import PAIR_KINDS, of_pair
from forerun.config import EngineConfig
from forerun.native import isa


@pytest.mark.parametrize(
    ("command", "package"),
    [("drafters", "drafters"), ("rules", "verify"), ("pacings", "pacing"), ("train heads", "train.heads")],
)
def test_lists_have_every_file_of_the_folder(ok: Any, command: str, package: str) -> None:
    lines = ok(*command.split()).splitlines()
    for name in registry.names(f"forerun.{package}"):
        assert any(line.startswith(f"{name} ") for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_one_method_is_shown_with_its_options(ok: Any, refused: Any) -> None:
    assert "max_n (int, 1 to 64)" in ok("drafters", "lookup")
    trained = ok("train", "heads", "pass")
    assert "vectors (int, 1 to 16)" in trained
    assert "Without --lr its learning rate is 0.01." in " ".join(trained.split())
    assert "there is no acceptance rule 'rato' (did you mean 'ratio'?)" in refused("rules", "rato")


def test_demo_shows_both_runs_and_says_in_which_mode_they_are_identical(
    ok: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--target", "llama", "--draft", "./draft", "--shape", "none", "--max-tokens", "16", "x = ")
    monkeypatch.setattr("forerun.cli.demo.program", "/folder/of/{}".format)
    printed = ok("demo", *arguments)
    headings = ("--- plain decoding ---", "--- with speculation ---")
    for words in (*headings, "speed-up", "acceptance rate", "  /folder/of/forerun bench latency --target"):
        assert words in printed
    dtype, build = ("float32", "torch ") if isa() == "reference" else ("bfloat16", f"native kernels, {isa()})")
    verdict = f"identical: yes, all 16 tokens (greedy; {dtype} weights on cpu; {build}"
    assert verdict in " ".join(printed.split())
    assert all(len(line) <= 80 for line in printed.splitlines() if line.startswith(("plain", "speculative")))


def test_demo_of_a_pair_shows_each_kind_of_work_and_sums_them_up(ok: Any, written: Any) -> None:
    template = written("{% for message in messages %}{{ message.content }}{% endfor %}", "template.jinja")
    pair = ("--pair", "--target", "long", "--draft", "./draft", "--max-tokens", "3")
    printed = ok("demo", *pair, FORERUN_CHAT_TEMPLATE=template, FORERUN_MAX_SEQ_LEN="4096")
    assert printed.count("identical: yes, all 3 tokens") == len(PAIR_KINDS)
    assert "Question: I want to swim" in printed
    summary = printed.partition("=== All of them ===")[2].splitlines()
    for words in ("an edit of code", "a question about a text", "ordinary chat", "a story", "geometric mean"):
        assert any(line.startswith(words) and line.count("x") >= 2 for line in summary), words


def test_the_files_of_the_pair_are_those_of_the_folder_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("qwen2.5-coder-1.5b-q8_0", "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M", "qwen2.5-coder-0.5b", "other-1.5b"):
        (tmp_path / f"{name}.gguf").touch()
    monkeypatch.setenv("FORERUN_PAIR", str(tmp_path))
    both = of_pair(EngineConfig())
    assert both.target == str(tmp_path / "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf")
    assert both.draft == str(tmp_path / "qwen2.5-coder-0.5b.gguf")
    assert of_pair(EngineConfig(draft="suffix")).draft == "suffix"
    assert of_pair(EngineConfig(target="llama")) == EngineConfig(target="llama")


ONE_PROMPT = '{"id": "a", "text": "def f(n):"}\n'
HOW_TO_GET_THE_PAIR = (
    "where there is a network, `hf download Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF --include '*q4_k_m.gguf' --local-dir "
    "pair` (1.1 GB) and `hf download Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF --include '*q4_k_m.gguf' --local-dir pair` "
    "(0.5 GB) bring it, and FORERUN_PAIR=pair names that folder; or name two files with --target and --draft"
)


@pytest.mark.parametrize("folder", [True, False])
def test_a_sentence_says_how_to_get_the_pair(
    refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    why = f"FORERUN_PAIR={tmp_path} is no folder with a file qwen2.5-coder-1.5b*.gguf"
    said = why if folder else "the pair is not here, and the hub cannot be asked"
    given = {"FORERUN_PAIR": str(tmp_path)} if folder else {}
    assert refused("demo", "--pair", **given) == f"{said}: {HOW_TO_GET_THE_PAIR}"
    monkeypatch.setattr("forerun.cli.demo.program", "/folder/of/{}".format)
    assert "`/folder/of/hf download Qwen/" in refused("demo", "--pair", **given)


def test_bench_widen_writes_a_checkpoint_that_says_the_same(cli: Any, ok: Any, tmp_path: Path) -> None:
    heads = ("--num-heads", "16", "--num-kv-heads", "4")
    sizes = ("--hidden-size", "128", "--num-layers", "3", *heads, "--ffn-size", "64")
    out = str(tmp_path / "wide")
    printed = ok("bench", "widen", "llama", out, "--shape", "demo", *sizes)
    assert "a widened small model (hidden 128, 3 layers, ffn 64, 16/4 heads of 8, 257 ids)" in printed
    base = ("--draft", "none", "--temperature", "0", "--max-tokens", "24", "--json", "def f(n):")
    small, wide = (json.loads(cli("generate", "--target", folder, *base).stdout) for folder in ("llama", out))
    assert small["token_ids"] == wide["token_ids"]


def test_bench_latency_prints_its_limit_two_tables_and_one_json_line(cli: Any, written: Any) -> None:
    prompts = written(ONE_PROMPT + '{"id": "b", "text": "class A:"}\n', "prompts.jsonl")
    base = ("--target", "llama", "--draft", "./draft", "--draft", "lookup", "--prompt-file", prompts)
    done = cli("bench", "latency", *base, "--max-tokens", "24", "--spec-length", "3", "--json", "-", code=0)
    lines = done.stdout.splitlines()
    assert any(line.startswith("limit without speculation: ") for line in lines[:4])
    assert all(len(line.rstrip()) <= 80 for line in lines[:-1])
    for told in ("2 prompts, 24 tokens each, at temperature 0 and 1: plain", "K: tokens drafted per step", "v(K): of"):
        assert told in " ".join(done.stdout.split())
    assert done.stderr == ""  # no progress bar in a pipe
    record = json.loads(lines[-1])
    assert [(line["temperature"], line["draft"]) for line in record["lines"]] == [
        (t, draft) for t in (0.0, 1.0) for draft in ("none", "./draft", "lookup")
    ]
    plain = record["lines"][0]
    assert plain["speedup"] == 1.0
    assert plain["tokens_per_step"] == 1.0
    model = record["lines"][1]
    assert 0 <= model["alpha_hat"] <= 1
    assert model["c"] > 0
    assert model["theorem_3_8"] > 0
    assert record["num_parameters"] > 0
    num_bytes = {"float32": 4, "bfloat16": 2}[record["dtype"]] * record["num_parameters"]
    assert num_bytes <= record["bytes_per_pass"] <= 1.1 * num_bytes  # packed matrices are padded
    assert record["widened"] is False


def test_json_of_a_benchmark_is_written_where_it_is_asked_for_and_nowhere_else(
    ok: Any, refused: Any, tmp_path: Path, written: Any
) -> None:
    prompts = written(ONE_PROMPT, "prompts.jsonl")
    base = ("bench", "latency", "--target", "llama", "--draft", "lookup", "--prompt-file", prompts)
    sizes = ("--max-tokens", "8", "--temperature", "0")
    assert "{" not in ok(*base, *sizes, "--json", str(tmp_path / "found.json"))
    assert json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["bench"] == "latency"
    for wrong in (tmp_path, tmp_path / "nowhere" / "found.json"):
        sentence = refused(*base, "--json", str(wrong))
        assert "cannot be written: name a file in a folder that may be written to" in sentence
    piped = ok(*base, *sizes)
    assert "limit without speculation: " in piped
    assert "{" not in piped


def test_bench_latency_compares_lengths_of_one_drafter(ok: Any, written: Any) -> None:
    prompts = written(ONE_PROMPT, "prompts.jsonl")
    lengths = ("--spec-length", "2", "--spec-length", "4")
    base = ("--target", "llama", "--draft", "./draft", "--temperature", "0", "--prompt-file", prompts)
    lines = ok("bench", "latency", *base, *lengths, "--max-tokens", "24", "--json", "-").splitlines()
    record = json.loads(lines[-1])
    measured = [(line["draft"], line["spec_length"]) for line in record["lines"]]
    assert measured == [("none", 0), ("./draft", 2), ("./draft", 4)]
    assert len(record["drafts"]) == 1  # loaded once for both lengths
    assert any(line.startswith("T=0 ./draft: best of the measured lengths is K=") for line in lines)


@pytest.mark.parametrize(
    ("draft", "sentence"),
    {
        "lookup": "'lookup' is no model that could be widened: name a draft model, or leave it out",
        "model:draft_top_k=4": "'model:draft_top_k=4' has options that a widened draft model has not: it takes "
        "path and quantization",
    }.items(),
)
def test_drafts_that_cannot_be_widened_are_refused(refused: Any, draft: str, sentence: str) -> None:
    """Before anything is loaded, wherever the draft is named."""
    words = ("bench", "latency", "--target", "nowhere", "--draft-shape", "demo")
    assert refused(*words, "--draft", draft) == f"--draft {sentence}"
    assert refused(*words, FORERUN_DRAFT=draft) == f"draft={sentence}"


def test_public_names_load_when_used() -> None:
    for name in forerun.__all__:
        assert getattr(forerun, name).__name__ == name
    assert set(forerun.__all__) <= set(dir(forerun))
