"""Measures alpha-hat of a target and its draft model, by decoding held-out prompts with forerun's engine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from forerun.engine.llm import LLM
from forerun.engine.request import RequestOutput
from forerun.errors import BadOption, NotFound, program, shown
from forerun.text.json_files import read_json_lines, wrong_line
from forerun.types import SamplingParams, StepReport

LIKE = 'write it like {"text": "def fib(n):"}'  # a line of a file of prompts


@dataclass(frozen=True)
class PairNumbers:
    """Holds the measured counts and rates of a target with its draft model, over all prompts.

    num_tested: the number of accepted tokens, plus one for each draft with a rejected token. alpha_hat: the share of
    tested tokens that were accepted; None where no token was tested.
    """

    temperature: float
    num_prompts: int
    spec_length: int
    num_drafted: int
    num_tested: int
    num_accepted: int
    num_steps: int
    num_emitted: int
    alpha_hat: float | None
    mean_accepted_length: float | None  # emitted tokens per target pass


def read_prompts(path: Path, limit: int | None = None, *, target: str | Path) -> list[str]:
    """Read the texts of a prompts.jsonl, such as `write_prompts` writes. A line has "text", or else "prompt".

    limit: the largest number of texts to return; they are spread evenly over the file. None = all texts. target: the
    model whose tokenizer a new file would need, for the error. Raises NotFound where there is no file, and BadOption,
    which names the line, for a file of another form.
    """
    if not path.exists():
        out = path if path.parent.is_dir() else Path(path.name)
        command = shlex.join(["--tokenizer", str(target), "--out", str(out)])
        raise NotFound(
            f"there is no file {shown(str(path))}: `{program('forerun')} train prompts {command}` makes one, or name "
            "another"
        )
    texts = list[str]()
    for number, row in read_json_lines(path, "prompt file", LIKE):
        text = row.get("text", row.get("prompt"))
        if not isinstance(text, str) or not text:
            raise wrong_line(number, path, 'has no text in "text" or "prompt"', LIKE)
        texts.append(text)
    if not texts:
        raise BadOption(f"the prompt file {shown(str(path))} is empty: {LIKE}, one line for each prompt")
    return texts if limit is None or limit >= len(texts) else [texts[i * len(texts) // limit] for i in range(limit)]


def measure_pair(
    target: Path,
    draft: Path,
    prompts: Sequence[str],
    temperature: float,
    *,
    max_tokens: int = 128,
    spec_length: int = 5,
    seed: int = 0,
    progress: Callable[[int], None] = lambda num_tokens: None,
) -> PairNumbers:
    """Decode every prompt speculatively with the draft model, and return the sums of the reports' counts.

    At a temperature above 0, drafts are verified by the ratio rule. Prompt i gets the seed `seed` + i, so a measurement
    can be repeated on one machine. progress: called after each step with the number of tokens so far, of `max_tokens`
    for each prompt.
    """
    llm = LLM(str(target), draft=str(draft), spec_length=spec_length)
    llm.listen(counted(progress))
    outputs = decode(llm, prompts, temperature, max_tokens, seed, ignore_eos=True)
    return pair_numbers(outputs, temperature, spec_length)


def counted(tell: Callable[[int], None]) -> Callable[[StepReport], None]:
    """Return a listener for an engine, which tells after each step how many tokens it has heard of so far."""
    num_tokens = 0

    def hear(report: StepReport) -> None:
        nonlocal num_tokens
        num_tokens += report.num_committed
        tell(num_tokens)

    return hear


def decode(
    llm: LLM, prompts: Sequence[str], temperature: float, max_tokens: int, seed: int, *, ignore_eos: bool
) -> list[RequestOutput]:
    """Decode every prompt, and return the outputs. Prompt i gets the seed `seed` + i.

    At a temperature above 0, drafts are verified by the ratio rule.
    """
    rule = None if temperature == 0 else "ratio"
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, acceptance=rule, ignore_eos=ignore_eos)
    return llm.generate(list(prompts), [replace(params, seed=seed + i) for i in range(len(prompts))])


def pair_numbers(outputs: Sequence[RequestOutput], temperature: float, spec_length: int) -> PairNumbers:
    """Return the sums of the counts in the reports of `outputs`, and the rates of these sums."""
    names = ("num_drafted", "num_tested", "num_accepted", "num_steps", "num_emitted")
    sums: dict[str, int] = {name: sum(getattr(output.report, name) for output in outputs) for name in names}
    tested, steps = sums["num_tested"], sums["num_steps"]
    return PairNumbers(
        temperature=temperature,
        num_prompts=len(outputs),
        spec_length=spec_length,
        alpha_hat=sums["num_accepted"] / tested if tested else None,
        mean_accepted_length=sums["num_emitted"] / steps if steps else None,
        **sums,
    )


def write_numbers(numbers: Sequence[PairNumbers], path: Path) -> None:
    """Write the measurements to a file, as one JSON object per line."""
    path.write_text("".join(json.dumps(asdict(n)) + "\n" for n in numbers), encoding="utf-8")
