"""The options of each benchmark, as dataclasses whose fields are the command's flags. This module imports no numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun import verify
from forerun.params import SamplingParams
from forerun.registry import check_fields, inherited, option

SHAPE_NAMES = "demo (about 0.4 B), llama-3.2-1b or llama-3.2-3b (with as many layers as it has, at least)"
SHAPE_HELP = f"the target is widened to it in memory: {SHAPE_NAMES}"

Prompt = str | list[int] | list[dict[str, Any]]  # a text, ids, or a conversation
Request = tuple[Prompt, SamplingParams]


class Plan:
    """The options of a benchmark, as fields of a frozen dataclass. Raises BadOption for a value out of range."""

    def __post_init__(self) -> None:
        check_fields(self)

    def record(self, *leave_out: str) -> dict[str, Any]:
        """Return the options for JSON, with paths as texts. leave_out: names of options to drop."""
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in fields.items()
            if name not in leave_out
        }


# ---------------------------------------------------------------------------------- fields that several benchmarks have


def shape(default: str | None = "none", help: str = f"{SHAPE_HELP}, or none", **about: Any) -> Any:
    """Make the field for the shape that the target is widened to. about: further arguments of `registry.option`."""
    return option(default, help, **about)


def repeats(default: int = 1, help: str = "times every prompt is run", least: int = 1) -> Any:
    """Make the field for how often every prompt is run. least: the smallest allowed number."""
    return option(default, help, flag="--repeats", min=least)


def prompt_file(what: str = '"id" and "text"') -> Any:
    """Make the field for a file with prompts. what: the names of a line's JSON fields, as help shows them."""
    return option(None, f"JSON lines with {what}", usual="the shipped ones")


def picture(help: str) -> Any:
    """Make the field for the file that a picture is written to."""
    return option(None, help, is_written=True)


WORK = '"id", "kind" and "messages"'
KINDS = "chat, summary, edit, question, list or story"


@dataclass(frozen=True)
class LatencyPlan(Plan):
    """The options of `forerun bench latency`.

    drafts: the drafters to measure; () = every drafter that needs no model or file of its own. With a draft_shape,
    `drafts` names the draft models to widen to that shape; () = the configuration's draft model. spec_lengths: the
    draft lengths; () = the configuration's length.
    """

    drafts: tuple[str, ...] = option((), "drafter to measure", flag="--draft", usual="all")
    shape: str = option("none", SHAPE_HELP, usual="none")
    draft_shape: str = option("none", "the same for the draft model, which is then the only drafter", usual="none")
    spec_lengths: tuple[int, ...] = option((), "tokens drafted per step (K)", flag="--spec-length", min=1, usual="5")
    temperatures: tuple[float, ...] = option((0.0, 1.0), "0 = greedy", flag="--temperature")
    acceptance: str = option("ratio", "verification rule at temperature > 0")
    num_prompts: int = option(5, "held-out prompts", flag="--prompts", min=1)
    max_tokens: int = option(64, "tokens per prompt", min=2)
    num_repeats: int = repeats()
    prompt_file: Path | None = prompt_file('"id", and "text" or a list of "ids"')
    seed: int = option(1, "of the sampled runs; each prompt adds its index")
    until_end: bool = option(False, "answers end where the model ends them, at the latest behind --max-tokens")


@dataclass(frozen=True)
class Way:
    """A way of drafting: a drafter, the pacing policy that sets its draft length, and the verification rule.

    name: consists of the fields in which the ways of a plan differ. acceptance: the rule, None = the engine's choice.
    """

    name: str
    draft: str
    pacing: str
    acceptance: str | None = None

    def keeps_texts(self, temperature: float) -> bool:
        """Return whether every text must equal the text from plain decoding.

        At temperature 0 this holds for every lossless rule. At temperature > 0 it holds only for the rule match; the
        other lossless rules keep the distribution.
        """
        rule = verify.find(self.acceptance or ("match" if temperature > 0 else "ratio"))
        return rule.is_lossless and (temperature == 0 or rule.name == "match")


@dataclass(frozen=True)
class MethodsPlan(Plan):
    """The options of `forerun bench methods`.

    drafts: () = every drafter that needs no file. pacings: () = the engine's policy. acceptances: () = the engine's
    choice: at temperature > 0 the rule `match`, because every run has a seed. kinds: () = all kinds in the prompt file.
    picture: the file of a picture, .svg or .png. Where the name has no suffix, both files are written.
    """

    drafts: tuple[str, ...] = option((), "drafter to measure, with its options", flag="--draft", usual="all")
    kinds: tuple[str, ...] = option((), KINDS, flag="--kind", usual="all")
    shape: str = shape()
    temperatures: tuple[float, ...] = option((0.0, 1.0), "0 = greedy", flag="--temperature")
    acceptances: tuple[str, ...] = option(
        (),
        "verification rules to compare, as in ratio,block",
        flag="--acceptance",
        usual="match at temperature > 0, which keeps texts",
    )
    pacings: tuple[str, ...] = option(
        (),
        "pacing policies to compare, as in auto,fixed,svip",
        flag="--pacing",
        usual="fixed where --spec-length is given, else auto",
    )
    prompts_per_kind: int = option(2, "of each kind", flag="--prompts", min=1)
    max_tokens: int = option(64, "tokens per prompt at most", min=2)
    num_repeats: int = repeats()
    prompt_file: Path | None = prompt_file(WORK)
    seed: int = option(1, "of the first run; each turn adds one")
    picture: Path | None = picture(
        "file for a picture, .svg or .png; both where its name has no ending; needs matplotlib"
    )

    def params(
        self, temperature: float, way: Way | None, salt: str, turn: int = 0, ignore_eos: bool = False
    ) -> SamplingParams:
        """Return the sampling parameters of one run of a prompt.

        way: the drafter and the rule; None = the engine's choice. salt: a drafter learns only from other runs with the
        same salt. turn: a number that is added to the seed. ignore_eos: whether the text goes on after an end token.
        """
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=temperature,
            seed=self.seed + turn,
            acceptance=None if way is None else way.acceptance,
            draft=None if way is None else way.draft,
            cache_salt=salt,
            ignore_eos=ignore_eos,
        )


@dataclass(frozen=True)
class SuitePlan(Plan):
    """The options of `forerun bench suite`.

    drafts, pacings, acceptances and picture: as in MethodsPlan. num_prompts: how many of the first prompts to run; None
    = all. prompts_per_kind: how many of the first prompts of each kind to run; None = all. most_rounds: how many times
    a kind of work is measured at most. In each measurement, plain decoding answers every conversation twice. If the
    speeds of the two answers differ by more than suite.NOISE (in the median), the kind is measured again.
    """

    drafts: tuple[str, ...] = option((), "drafter to measure, with its options", flag="--draft", usual="auto")
    kinds: tuple[str, ...] = option((), "of the suite's kinds of work", flag="--kind", usual="all")
    num_prompts: int | None = option(None, "the first so many", flag="--prompts", min=1, usual="all")
    prompts_per_kind: int | None = option(None, "the first so many of each kind", flag="--per-kind", min=1, usual="all")
    temperatures: tuple[float, ...] = option((0.0,), "0 = greedy", flag="--temperature")
    top_p: float = option(1.0, "share of probability that is drawn from at temperature > 0", min=0, max=1)
    acceptances: tuple[str, ...] = inherited(MethodsPlan, "acceptances", ())
    pacings: tuple[str, ...] = inherited(MethodsPlan, "pacings", ())
    max_tokens: int = option(192, "tokens of an answer at most", min=2)
    most_rounds: int = option(
        3,
        "times a kind is run at most: again while plain decoding differs from itself by over 3 %",
        flag="--rounds",
        min=1,
    )
    prompt_file: Path | None = option(
        None, "the suite's questions as its authors publish them", usual="the file in an installed package"
    )
    seed: int = option(1, "of the sampled runs; each conversation adds its place")
    picture: Path | None = inherited(MethodsPlan, "picture", None)


@dataclass(frozen=True)
class TunePlan(Plan):
    """The options of `forerun tune`.

    requests: () = the project's own prompts. shape: the shape that the target is widened to.
    """

    requests: Seq[Request] = ()
    shape: str = "none"
    out: Path | None = option(
        None,
        "config file to write, TOML, or JSON where its name ends in .json; every command takes it with --config",
        is_written=True,
    )
    picture: Path | None = picture("file for a plot of the speed-up by draft length, .svg or .png; needs matplotlib")
    drafts: tuple[str, ...] = option(
        (), "drafter to consider beside those that need no file: a draft model, or a name", flag="--draft"
    )
    only: bool = option(False, "consider those of --draft alone")
    temperature: float = option(0.0, "0 = greedy")
    concurrency: int = option(1, "requests at once", min=1, max=1024)
    minutes: float = option(5.0, "of measuring, about; a large model may need more")
    max_tokens: int = option(64, "tokens per prompt at most", min=2)
    seed: int = option(1, "of the sampled runs; each prompt adds its index")
