"""The model card of a target and its draft model, written from logs, so that every number in the card was measured."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from forerun.engine.llm import LLM
from forerun.errors import BadOption, NotFound, shown
from forerun.text.files import read_text_file
from forerun.text.json_files import read_json, read_json_lines, wrong_line
from forerun.train.corpus import load_corpus
from forerun.train.evaluate import PairNumbers, read_prompts
from forerun.types import SamplingParams

SAMPLE_TOKENS = 96

INTRODUCTION = """# The shipped pair

Two small language models of Python code that share one tokenizer: a *target* and a *draft* that guesses for it. They
are small enough to travel with the package, and real enough that every promise of forerun can be tried without a
download. They imitate the look of the standard library; what they write is not correct code and is of no use as such.

| | target | draft |
|---|---|---|
"""

UNDERTRAINED = """
The target has seen far too few tokens for its size: the small draft model predicts held-out text no worse than the
target does. For measuring speculation that does not matter (the question is how often the draft says what the target
says), but the text is only as good as these losses.
"""

LICENCE = """## Licence

The training text is the source of the Python standard library, under the PSF licence agreement, version 2. The weights,
the tokenizer and the code that made them are under Apache-2.0, like the rest of this package.
"""


def write_card(
    target: Path,
    draft: Path,
    numbers: Path,
    prompts: Path,
    out: Path,
    commands: Path | None = None,
    history: Seq[Path] = (),
    target_history: Seq[Path] = (),
) -> None:
    """Write the card to `out`, and the list of source files beside it as sources.txt.

    target, draft: out folders of `train lm`. numbers: the measurements that `train pair --out` wrote. prompts: see
    `samples_section`. commands: a file of shell commands to print in the card. history, target_history: out folders of
    earlier stages of the draft and of the target. Raises NotFound for a missing or unfinished run, for missing prompts,
    and if the standard library of the running Python is not the text on which the target was trained.
    """
    target_run = read_run(target)
    corpus = load_corpus()
    if corpus.fingerprint() != target_run.get("corpus_sha256"):
        raise NotFound("the corpus of this Python is not the one that the target was trained on: use that version")
    parts = [
        INTRODUCTION + model_table((*target_history, target), (*history, draft)),
        pair_section(numbers),
        data_section(target_run, corpus_counts(corpus)),
        stage_section((*target_history, target), (*history, draft)),
        samples_section(target / "model", prompts),
    ]
    if commands is not None:
        parts.append(f"## Commands\n\n```sh\n{read_text_file(commands, 'file of commands').strip()}\n```\n")
    out.write_text("\n".join([*parts, LICENCE]), encoding="utf-8")
    lines = [f"{name} {d.path}" for name in ("train", "validation", "bench") for d in getattr(corpus, name)]
    (out.parent / "sources.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_run(folder: Path) -> dict[str, Any]:
    """Return the content of run.json in an out folder, with the lines of log.jsonl added as the entry "log".

    Raises NotFound where there is no run.json, and where the log has no line. Raises BadOption for a run of another
    command, and for a log with a line that cannot be read.
    """
    if not (folder / "run.json").exists():
        raise NotFound(f"there is no run.json in {folder}: name an out folder of `forerun train lm`")
    run: dict[str, Any] = read_json(folder / "run.json")
    options = run.get("options")
    if not isinstance(options, dict) or not isinstance(options.get("shape"), dict):
        raise BadOption(f"{shown(str(folder))} holds no run of `forerun train lm`: name an out folder of it")
    run["log"] = [line for _, line in read_json_lines(folder / "log.jsonl", "log", "remove the line")]
    if not run["log"]:
        raise NotFound(f"the log in {shown(str(folder))} is empty: name the out folder of a run that has begun")
    return run


def corpus_counts(corpus: Any) -> dict[str, tuple[int, int]]:
    """Return the number of modules and the number of characters of each split, by the name of the split."""
    splits = {name: getattr(corpus, name) for name in ("train", "validation", "bench")}
    return {name: (len(split), sum(len(d.text) for d in split)) for name, split in splits.items()}


def model_table(target_stages: Seq[Path], draft_stages: Seq[Path]) -> str:
    """Return the rows of the table after the introduction: shapes, parameters, bytes, tokens, losses, date.

    target_stages, draft_stages: the out folders of all training runs of each model, earliest first.
    """
    stages = [[read_run(folder) for folder in folders] for folders in (target_stages, draft_stages)]
    runs = [runs_of_model[-1] for runs_of_model in stages]
    shapes = [run["options"]["shape"] for run in runs]
    tokens = [sum(run["log"][-1]["tokens"] for run in runs_of_model) for runs_of_model in stages]
    folders = (target_stages[-1], draft_stages[-1])
    sizes = [(folder / "model" / "model.safetensors").stat().st_size for folder in folders]
    rows = [
        ("parameters", [f"{run['num_parameters']:,}" for run in runs]),
        ("hidden size", [s["hidden_size"] for s in shapes]),
        ("layers", [s["num_layers"] for s in shapes]),
        (
            "query / key-value heads",
            [f"{s['num_heads']} / {s['num_kv_heads']} of {s['hidden_size'] // s['num_heads']}" for s in shapes],
        ),
        ("feed-forward width", [s["ffn_size"] for s in shapes]),
        ("vocabulary", [s["vocab_size"] for s in shapes]),
        (
            f"longest context, tokens (trained on {_values(runs, 'seq_len_tokens')})",
            [s["max_positions"] for s in shapes],
        ),
        ("weights, bfloat16, bytes", [f"{size:,}" for size in sizes]),
        ("tokens trained on", [f"{n:,}" for n in tokens]),
        ("validation loss, nats per token", [f"{final(run)['validation_loss']:.4f}" for run in runs]),
        ("finished", [run["date"] for run in runs]),
    ]
    table = "".join(f"| {name} | {a} | {b} |\n" for name, (a, b) in rows)
    losses = [final(run)["validation_loss"] for run in runs]
    return table if losses[0] < losses[1] else table + UNDERTRAINED


def final(run: dict[str, Any]) -> dict[str, Any]:
    """Return the last line of a run's log. Raises NotFound where the run has not finished."""
    last: dict[str, Any] = run["log"][-1]
    if not last.get("final"):
        raise NotFound("the run has not finished: its log has no final line")
    return last


def pair_section(numbers: Path) -> str:
    """Return the section on how often drafted tokens were accepted (alpha-hat). numbers: see `write_card`."""
    again = "measure again with `forerun train pair --out`"
    rows = read_json_lines(numbers, "file of numbers", again)
    text = (
        "## How often the draft is right\n\nMeasured by decoding held-out prompts (`prompts.jsonl`) with the package's "
        "own engine in float32; alpha-hat is\naccepted / tested tokens.\n\n"
        "| temperature | prompts | spec length | tested | accepted | alpha-hat | tokens per target pass |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    for number, row in rows:
        if lacking := [name for name in PairNumbers.__dataclass_fields__ if not isinstance(row.get(name), int | float)]:
            raise wrong_line(number, numbers, f"has no number {lacking[0]}", again)
        text += (
            f"| {row['temperature']:g} | {row['num_prompts']} | {row['spec_length']} | {row['num_tested']:,} | "
            f"{row['num_accepted']:,} | {row['alpha_hat']:.3f} | {row['mean_accepted_length']:.2f} |\n"
        )
    return text


def data_section(run: dict[str, Any], counts: dict[str, tuple[int, int]]) -> str:
    """Return the section on the data, with the hashes by which a reader can check the data.

    run: the target's run, as `read_run` returns it. counts: the result of `corpus_counts`.
    """
    listed = "; ".join(f"{name} {n} modules, {chars:,} characters" for name, (n, chars) in counts.items())
    return (
        f"## Data\n\nThe standard library of CPython {run['python']}, without tests, tables and machine-dependent "
        f"files: {listed}.\nWhole modules are held out. `sources.txt` lists every file with its split. The train split "
        f"is {run['num_text_tokens']:,} tokens.\n\n"
        f"- SHA-256 of splits, paths and normalised texts: `{run['corpus_sha256']}`\n"
        f"- SHA-256 of tokenizer.json: `{run['tokenizer_sha256']}`\n"
    )


def stage_section(target_stages: Seq[Path], draft_stages: Seq[Path]) -> str:
    """Return the section with options and losses of each training run.

    Earlier stages need no final line in their logs, because they may have been stopped early. target_stages,
    draft_stages: the out folders of all training runs of each model, earliest first.
    """
    text = (
        "## Training\n\nAdamW (0.9, 0.95), weight decay on matrices, gradient norm clipped, linear warm-up, constant "
        "rate, linear decay to 0.\nLosses are nats per token; alpha is the mean of sum min(p, q), agreement the share "
        "of equal argmaxes, both along held-out text.\n\n"
        "| run | layers | loss | steps | tokens per step | peak rate | hours | validation | kl | alpha | agreement |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    named = [(name, f) for name, folders in (("target", target_stages), ("draft", draft_stages)) for f in folders]
    runs = [read_run(folder) for _, folder in named]
    for (name, _), run in zip(named, runs, strict=True):
        options, last = run["options"], last_numbers(run)
        measured = [
            f"{last[key]:.4f}" if key in last else "" for key in ("validation_loss", "kl", "alpha", "agreement")
        ]
        text += (
            f"| {name} | {options['shape']['num_layers']} | {options['loss']} | {last['step']:,} | "
            f"{options['tokens_per_step']:,} | {options['lr']:g} | {last['elapsed_s'] / 3600:.2f} | "
            f"{' | '.join(measured)} |\n"
        )
    return f"{text}\nSeeds {_values(runs, 'seed')}, torch {_values(runs, 'torch')}, CPU, float32.\n"


def _values(runs: Seq[dict[str, Any]], name: str) -> str:
    """Return the different values that runs have of an entry or an option, in the runs' order, joined by 'and'."""
    return " and ".join(dict.fromkeys(str({**run, **run["options"]}[name]) for run in runs))


def last_numbers(run: dict[str, Any]) -> dict[str, Any]:
    """Return the last logged value of each training measure, by name. run: as `read_run` returns it."""
    numbers: dict[str, Any] = {}
    for line in run["log"]:
        numbers |= line
    return numbers


def samples_section(target: Path, prompts: Path) -> str:
    """Return the section with five continuations by the target: two greedy, three at temperature 0.8.

    prompts: the file of held-out prompts that are continued.
    """
    texts = read_prompts(prompts, 5, target=target)
    llm = LLM(str(target), draft="none")
    text = "## Five continuations\n\nOf held-out prompts, by the target alone; the prompt ends at the mark `▶`.\n"
    for i, prompt in enumerate(texts):
        temperature = 0.0 if i < 2 else 0.8
        params = SamplingParams(max_tokens=SAMPLE_TOKENS, temperature=temperature, seed=i)
        (output,) = llm.generate([prompt], params)
        text += f"\nTemperature {temperature:g}, seed {i}:\n\n```python\n{prompt}▶{output.text}\n```\n"
    return text
