"""Measures alpha-hat of a target and its draft model, by decoding held-out prompts with forerun's engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from forerun.engine.llm import LLM
from forerun.engine.request import RequestOutput
from forerun.errors import NotFound
from forerun.types import SamplingParams


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


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """Read the texts of a prompts.jsonl, such as `write_prompts` writes. Raises NotFound where there is no file.

    limit: the largest number of texts to return; they are spread evenly over the file. None = all texts.
    """
    if not path.exists():
        raise NotFound(f"there is no {path}: `forerun train prompts` makes it")
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
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
) -> PairNumbers:
    """Decode every prompt speculatively with the draft model, and return the sums of the reports' counts.

    At a temperature above 0, drafts are verified by the ratio rule. Prompt i gets the seed `seed` + i, so a measurement
    can be repeated on one machine.
    """
    llm = LLM(str(target), draft=str(draft), spec_length=spec_length)
    outputs = decode(llm, prompts, temperature, max_tokens, seed, ignore_eos=True)
    return pair_numbers(outputs, temperature, spec_length)


def decode(
    llm: LLM, prompts: Sequence[str], temperature: float, max_tokens: int, seed: int, *, ignore_eos: bool
) -> list[RequestOutput]:
    """Decode every prompt, and return the outputs. Prompt i gets the seed `seed` + i.

    At a temperature above 0, drafts are verified by the ratio rule.
    """
    params = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed + i,
            acceptance=None if temperature == 0 else "ratio",
            ignore_eos=ignore_eos,
        )
        for i in range(len(prompts))
    ]
    return llm.generate(list(prompts), params)


def pair_numbers(outputs: Sequence[RequestOutput], temperature: float, spec_length: int) -> PairNumbers:
    """Return the sums of the counts in the reports of `outputs`, and the rates of these sums."""
    reports = [output.report for output in outputs]
    tested, accepted = sum(r.num_tested for r in reports), sum(r.num_accepted for r in reports)
    steps, emitted = sum(r.num_steps for r in reports), sum(r.num_emitted for r in reports)
    return PairNumbers(
        temperature=temperature,
        num_prompts=len(outputs),
        spec_length=spec_length,
        num_drafted=sum(r.num_drafted for r in reports),
        num_tested=tested,
        num_accepted=accepted,
        num_steps=steps,
        num_emitted=emitted,
        alpha_hat=accepted / tested if tested else None,
        mean_accepted_length=emitted / steps if steps else None,
    )


def write_numbers(numbers: Sequence[PairNumbers], path: Path) -> None:
    """Write the measurements to a file, as one JSON object per line."""
    path.write_text("".join(json.dumps(asdict(n)) + "\n" for n in numbers), encoding="utf-8")
