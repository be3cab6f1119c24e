"""`forerun plan`: config.json in, a table and an exit code out; no weights anywhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, ops as operators
from forerun.cli.plan import parse_bytes
from forerun.errors import BadOption
from support import needs_native

OPS = ["reference", pytest.param("native", marks=needs_native)]
LLAMA_1B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LLAMA_3B = LLAMA_1B | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128}


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two folders that hold config.json and nothing else."""
    root = tmp_path_factory.mktemp("llamas")
    for name, raw in (("3b", LLAMA_3B), ("1b", LLAMA_1B)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return str(root / "3b"), str(root / "1b")


def planned(cli: Any, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON object of a plan, with the bytes of its parts by name, and in words how they come about."""
    found: dict[str, Any] = json.loads(cli("plan", *arguments, "--json", code=code).stdout)
    parts, how = ({part["name"]: part[key] for part in found["parts"]} for key in ("bytes", "how"))
    return {**found, "parts": parts, "how": how}


def test_a_pass_holds_no_more_tokens_than_it_may(cli: Any, llamas: tuple[str, str]) -> None:
    """Of 64 requests with drafts, of which `--pacing` says how long they are."""
    base = (llamas[0], "--draft", "lookup", "--device", "cpu", "--ops", "reference", "--max-batch-size", "64")
    base = (*base, "--max-seq-len", "512", "--memory", "64GB")
    limits = [(), ("--pacing", "fixed"), ("--max-num-batched-tokens", "128")]
    plans = [planned(cli, *base, *limit) for limit in limits]
    sums = [sum(plan["parts"].values()) for plan in plans]
    assert sums[0] > sums[1] > sums[2]
    assert plans[0]["spec_length"] > plans[1]["spec_length"]


def test_a_published_pair_from_config_json_alone(cli: Any, llamas: tuple[str, str]) -> None:
    target, draft = llamas
    base = ("--target", target, "--draft", draft, "--dtype", "bfloat16", "--device", "cpu", "--ops", "reference")
    base = (*base, "--spec-length", "5")
    lines = cli("plan", *base, "--memory", "16GB", code=0).stdout.splitlines()
    assert lines[0] == "8 sequences of up to 32,768 tokens, 5 drafts a step, bfloat16 on cpu (reference)"
    for line in (
        "target weights           6.425   5.984  3,212,749,824 weights x 2 bytes",
        "draft weights            2.472   2.302  1,235,814,400 weights x 2 bytes",
        "target KV cache          3.758   3.500  32,768 tokens x 114,688 bytes",
        "draft KV cache           1.074   1.000  32,768 tokens x 32,768 bytes",
    ):
        assert line in lines
    assert any(line.startswith("It fits: ") for line in lines)
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
    parts = planned(cli, *base, "--memory", "16GB")["parts"]
    assert sum(parts[name] for name in ("target weights", "draft weights")) == 8_897_128_448
    assert (parts["target KV cache"], parts["draft KV cache"]) == (7 * 2**29, 2**30)


def test_a_pair_that_generate_refuses_is_refused(cli: Any, refused: Any, llamas: tuple[str, str]) -> None:
    """A plan that fits is no use for a draft with other tokens; what cannot be compared is said."""
    base = ("--target", "llama", "--draft", "./stranger")
    assert refused("plan", *base) == refused("generate", *base, "x")
    alone = cli("plan", "--target", llamas[0], "--draft", llamas[1], "--device", "cpu")
    assert "Whether draft and target have the same tokens was not checked: " in " ".join(alone.stdout.split())


def test_exit_code_3_and_what_would_fit(cli: Any, llamas: tuple[str, str]) -> None:
    base = ("--target", llamas[0], "--draft", llamas[1], "--dtype", "bfloat16", "--memory", "12GB")
    done = cli("plan", *base, code=3)
    assert done.stderr == ""
    sentence = " ".join(done.stdout.split())
    assert "It does not fit: " in sentence
    found = planned(cli, *base, code=3)
    assert not found["fits"]
    assert set().union(*found["suggestions"]) == {"max_batch_size", "max_seq_len", "kv_cache_tokens"}
    for suggestion in found["suggestions"]:
        (name, value), *_ = suggestion.items()
        assert f"{name}={value}" in sentence
        assert planned(cli, *base, f"--{name.replace('_', '-')}", str(value))["fits"]
    words = " ".join(cli("plan", *base[:-1], "6GB").stdout.split())
    assert "Nothing fits: the weights alone need 7.20 GB" in words, words[-400:]


def test_less_context_where_memory_is_short_and_none_was_asked(cli: Any, llamas: tuple[str, str]) -> None:
    base = ("--target", llamas[1], "--draft", "none", "--dtype", "bfloat16", "--device", "cpu", "--max-batch-size", "1")
    whole = planned(cli, *base)
    assert (whole["max_seq_len"], whole["parts"]["target KV cache"]) == (32_768, 2**30)
    memory = ("--memory", str(sum(whole["parts"].values()) - 1))
    assert planned(cli, *base, *memory)["max_seq_len"] == 4096
    assert planned(cli, *base, *memory, "--kv-cache-tokens", "32768")["max_seq_len"] == 4096
    assert not planned(cli, *base, *memory, "--max-seq-len", "32768", code=3)["fits"]


@needs_native
def test_a_plan_for_the_native_operators(cli: Any, llamas: tuple[str, str]) -> None:
    """They are what a CPU computes with where nothing is said: norms in float32, and nothing that comes in time."""
    base = ("--target", llamas[0], "--draft", llamas[1], "--device", "cpu", "--memory", "16GB")
    lines = cli("plan", *base, code=0).stdout.splitlines()
    assert lines[0] == "8 sequences of up to 32,768 tokens, 16 drafts a step, bfloat16 on cpu (native)"
    assert "draft KV cache           1.074   1.000  32,768 tokens x 32,768 bytes" in lines
    assert "In time, on top" not in " ".join(lines)
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
    parts = planned(cli, *base)["parts"]
    assert parts["target weights"] == 2 * 3_212_749_824 + 2 * (2 * 28 + 1) * 3072
    assert parts["pass buffers"] > 0


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("ops", ["auto", *OPS])
def test_a_plan_is_what_the_engine_allocates(cli: Any, checkpoints: Path, ops: str, dtype: str) -> None:
    options = {"max_batch_size": 3, "max_seq_len": 100, "kv_cache_tokens": 130, "ops": ops, "dtype": dtype}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    found = planned(cli, "--target", "llama", "--draft", "./draft", *flags)
    llm = LLM(checkpoints / "llama", draft=str(checkpoints / "draft"), **options)
    runners = {"target": llm.engine.runner, "draft": llm.engine.drafter.first.runner}
    for name, runner in runners.items():
        assert found["parts"][f"{name} weights"] == runner.model.bytes_per_pass  # its embedding is tied
        assert found["parts"][f"{name} KV cache"] == sum(pool.nbytes for pool in runner.cache.pools.tensors())
    assert found["max_seq_len"] == llm.engine.max_seq_len
    assert found["ops"] == llm.checkpoint.model.ops.name == operators.resolve(ops, "cpu")
    assert found["dtype"] == str(llm.checkpoint.model.weight_dtype).removeprefix("torch.")


def test_extra_draft_models_have_lines_of_their_own(cli: Any, checkpoints: Path) -> None:
    """Those that an engine really loads beside its own: each with a cache, other weights with theirs, lookup bare."""
    options = {"max_batch_size": 3, "max_seq_len": 100, "dtype": "float32"}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    specs = ["./draft", "lookup:max_n=2", "model:path=mistral,draft_top_k=9"]
    base = ("--target", "llama", "--draft", "draft", *flags)
    extra = ("--extra-drafts", ";".join(specs))
    found = planned(cli, *base, *extra)
    full = [spec.replace("path=", f"path={checkpoints}/").replace("./", f"{checkpoints}/") for spec in specs]
    llm = LLM(checkpoints / "llama", draft=str(checkpoints / "draft"), extra_drafts=";".join(full), **options)
    members = llm.engine.drafter.members
    for label, name in {"draft": "model", "extra draft": full[0], "extra draft 2": full[2]}.items():
        runner = members[name].runner  # type: ignore[attr-defined]
        own = 0 if label == "extra draft" else runner.model.bytes_per_pass  # it has those of the draft
        assert found["parts"].get(f"{label} weights", 0) == own
        assert found["parts"][f"{label} KV cache"] == sum(p.nbytes for p in runner.cache.pools.tensors())
    assert found["extra_drafts"] == {"extra draft": specs[0], "extra draft 2": specs[2]}
    assert not any(name.startswith("extra draft 3") for name in found["parts"])

    lines = cli("plan", *base, *extra).stdout.splitlines()
    assert lines[1:3] == [f"extra draft: {specs[0]}", f"extra draft 2: {specs[2]}"]
    assert sum(line.startswith("extra draft KV cache ") for line in lines) == 1
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)

    fitting = str(planned(cli, *base)["total_bytes"])
    assert planned(cli, *base, "--memory", fitting)["fits"]
    printed = cli("plan", *base, *extra, "--memory", fitting, code=3).stdout
    assert f"Weights and KV cache of extra_drafts='{specs[0]}; {specs[2]}' are " in " ".join(printed.split())


def test_the_draft_is_the_one_that_the_engine_would_choose(cli: Any, checkpoints: Path) -> None:
    pair = ("--target", "shipped")
    shipped, given = planned(cli, *pair), planned(cli, "--target", "llama")
    assert shipped["parts"]["draft weights"] > 0  # the shipped target has a draft model of its own
    assert "draft weights" not in given["parts"]  # any other gets lookup
    for spec in ("none", "lookup:max_n=2"):
        assert "draft weights" not in planned(cli, *pair, "--draft", spec)["parts"]
    drafts = ("./draft", "draft", f"model:path={checkpoints / 'draft' / 'config.json'}")
    sizes = {planned(cli, "--target", "llama", "--draft", draft)["parts"]["draft weights"] for draft in drafts}
    assert sizes == {given["parts"]["target weights"]}  # both are of one shape
    assert planned(cli, *pair, "--draft", "none")["spec_length"] == 0


def test_shapes_are_those_of_widened_models(cli: Any) -> None:
    wide = ("--shape", "llama-3.2-3b", "--draft-shape", "llama-3.2-1b", "--dtype", "bfloat16")
    longer = planned(cli, *wide, "--memory", "64GB", "--max-seq-len", "4096", "--ops", "reference")
    assert longer["max_seq_len"] == 4096, "more than the positions of the model that is widened"
    found = planned(cli, *wide, "--memory", "16GB", "--max-seq-len", "2048", "--ops", "reference")
    assert found["parts"]["target weights"] == 2 * 3_212_749_824
    assert found["parts"]["draft weights"] == 2 * 1_235_814_400
    assert found["parts"]["target KV cache"] == 8 * 2048 * 114_688


def test_type_and_device(cli: Any, llamas: tuple[str, str]) -> None:
    base = ("--target", llamas[1], "--memory", "64GB")
    assert planned(cli, *base, "--device", "cpu", "--ops", "reference")["dtype"] == "float32"
    assert planned(cli, *base, "--device", "cpu", "--ops", "reference_row_by_row")["dtype"] == "float32"
    own = planned(cli, *base, "--device", "cpu")
    assert (own["ops"], own["dtype"]) in (("native", "bfloat16"), ("reference", "float32"))
    assert own["ops"] == operators.resolve("auto", "cpu")
    cuda = planned(cli, *base, "--device", "cuda")  # planned for where there is none
    assert (cuda["dtype"], cuda["device"]) == ("bfloat16", "cuda")
    assert "target probabilities" not in cuda["parts"]
    assert planned(cli, *base, "--device", "cuda", "--dtype", "float32")["dtype"] == "float32"


def test_without_memory_the_machine_is_asked(cli: Any) -> None:
    assert planned(cli, "--target", "llama")["available_bytes"] > 0


REFUSED = {
    "words": (("--memory", "lots"), "--memory 'lots' is not possible: write a number of bytes as 16GB, 16GiB or 8e9"),
    "an unknown unit": (("--memory", "16G"), "--memory '16G' is not possible"),
    "nothing": (("--memory", "0GB"), "--memory '0GB' is not possible"),
    "a shape without a draft": (
        ("--draft", "none", "--draft-shape", "demo"),
        "--draft-shape 'demo' needs a draft model, and --draft 'none' has none",
    ),
    "an unknown shape": (("--shape", "llama-3.2-2b"), "did you mean 'llama-3.2-"),
    "an unknown drafter": (("--draft", "lokup"), "there is no drafter 'lokup' (did you mean 'lookup'?)"),
    "an unknown extra drafter": (("--extra-drafts", "lookup; lokup"), "there is no drafter 'lokup'"),
    "an extra model without a name": (("--target", "llama", "--extra-drafts", "model"), "needs a draft model"),
    "a wrong option": (("--draft", "lookup:max_n=0"), "lookup:max_n=0 is not possible"),
    "no draft model": (("--target", "llama", "--draft", "model"), "the drafter 'model' needs a draft model"),
    "too long": (("--max-seq-len", "100000"), "--max-seq-len 100000 is not possible: the model has 2048 positions"),
    "less than a block": (
        ("--kv-cache-backend", "contiguous", "--kv-cache-tokens", "100"),
        "--kv-cache-tokens 100 is less than one block of 2048 tokens",
    ),
    "operators of another device": (
        ("--device", "cuda", "--ops", "native", "--memory", "9GB"),
        "--ops 'native' computes on the CPU and contradicts --device 'cuda'",
    ),
    "no checkpoint": (("--target", "./nowhere"), "there is no folder nowhere"),
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refusals(refused: Any, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused("plan", *arguments, FORERUN_TARGET="shipped")


def test_amounts_of_memory() -> None:
    amounts = {"16GB": 16 * 10**9, "16 GiB": 2**34, "1.5gib": 3 * 2**29, "8e9": 8 * 10**9, "512MiB": 2**29, "100": 100}
    assert {text: parse_bytes(text) for text in amounts} == amounts
    for text in ("", "GB", "-1GB", "1.2.3GB", "16 G B", "nan", "1e999"):
        with pytest.raises(BadOption):
            parse_bytes(text)
