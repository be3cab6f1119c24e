"""Lets a target write the texts from which a drafter learns, because a drafter must guess the target's own texts.

There are three kinds of text. *chat*: the target answers a given question. If no questions are given, the target gets
only the opening of a user's turn. Then the target first writes the question, at temperature 1, and then the answer (Xu
et al. 2024, "Magpie", arXiv 2406.08464). *task*: the target answers an instruction about a passage of a given text.
*text*: the target continues a passage of a given text.

Half of the answers and continuations are greedy, and the others are drawn at temperatures of 0.5 and 1, because users
use all these temperatures (Zhou et al. 2024, "DistillSpec", section 4: on-policy data). A text that repeats itself is
cut after the third repetition, because endless repetitions, which small models write, teach nothing.

All texts are written in one continuous batch. Sample i depends only on its number and the options: kind, passage and
temperature are drawn with the sample's seed. If the engine's operators are row-invariant, the drawn tokens do not
depend on other sequences of the batch.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from queue import SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forerun.engine.llm import LLM
from forerun.engine.request import Request
from forerun.errors import BadOption, NotFound
from forerun.text.tokenizer import Tokenizer
from forerun.train.fingerprint import fingerprint
from forerun.train.samples import Sample, SampleWriter
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from forerun.train.features import Features
    from forerun.train.recording import Recording

LOG = logging.getLogger(__name__)
INSTRUCTIONS = (
    "Summarise this text in a few sentences.\n\n{}",
    "What are the main points of this text? Make a list.\n\n{}",
    "Explain this to a beginner.\n\n{}",
    "Rewrite this text in simpler words.\n\n{}",
    "{}\n\nWhat does this mean, and when would I need it?",
    "Read the text and write three questions about it, with their answers.\n\n{}",
    "Write a table of the names in this text and what each of them is.\n\n{}",
    "Print this again and correct what is wrong in it.\n\n{}",
    "Continue this text.\n\n{}",
    "Write a short story in which this text plays a part.\n\n{}",
)
MARK = "FORERUN-PLACE-OF-THE-QUESTION"
TEMPERATURES = (0.0, 0.0, 0.5, 1.0)  # of answers and continuations; each entry is equally likely
PERIODS = range(1, 65)  # numbers of tokens that a repeated part may have
REPEATED = 3  # repetitions of a part end a text,
LEAST_REPEATED = 32  # where they have at least so many tokens in all
LOOK_EVERY = 16  # tokens from one look for repetitions to the next
MOST_REPEATED = 64  # samples in a row with a beginning that an earlier sample has
WINDOW = 8  # samples that may be begun, for each place in the batch, while the first of them is not finished


@dataclass(frozen=True)
class Shares:
    """Holds the shares of the three kinds of text among the samples. The sum of the shares is 1.

    Raises BadOption for other shares.
    """

    chat: float = 0.7
    task: float = 0.15
    text: float = 0.15

    def __post_init__(self) -> None:
        parts = (self.chat, self.task, self.text)
        if min(parts) < -1e-6 or abs(sum(parts) - 1) > 1e-6:  # 1 - 0.8 - 0.2 is not 0
            raise BadOption(f"the shares of chat, task and text are {parts}: they must be at least 0, and 1 together")

    def kind(self, drawn: float) -> str:
        """Return the kind of text for a uniform random number in [0, 1)."""
        return "chat" if drawn < self.chat else "task" if drawn < self.chat + self.task else "text"


@dataclass(frozen=True)
class Lengths:
    """Holds limits for the number of tokens of a text's parts.

    passage: the smallest and the largest number. question, answer: the largest number.
    """

    passage: tuple[int, int] = (16, 160)
    question: int = 160
    answer: int = 320


@dataclass(frozen=True)
class Frame:
    """Holds the ids that a chat template puts before and after the first question; () and () without a template."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def opens_a_turn(cls, llm: LLM) -> bool:
        """Return whether a model's chat template puts ids before the user's text.

        From these ids, the model can write a user's question itself. Returns False for a model without a usable chat
        template.
        """
        try:
            return cls.of_model(llm).before != ()
        except (NotFound, BadOption):
            return False

    @classmethod
    def of_model(cls, llm: LLM) -> Frame:
        """Return the frame of a model's chat template. For this, render a conversation, and cut it at the user's text.

        Raises NotFound if the model has no template, and BadOption if the template changes the user's text.
        """
        text = llm.chat_template.render([{"role": "user", "content": MARK}], add_generation_prompt=True)
        before, mark, after = text.partition(MARK)
        if not mark:
            raise BadOption("the chat template does not print a user's text as it is: sample with --chat 0 --task 0")
        return cls(*(tuple(llm.tokenizer.encode(part, add_special_tokens=False)) for part in (before, after)))


@dataclass(frozen=True)
class Plan:
    """Holds the decisions about a sample before the target writes it.

    kind: chat, task or text. seed: the seed of the request. prompt: the token ids that are given to the target.
    """

    number: int
    kind: str
    temperature: float
    seed: int
    prompt: tuple[int, ...]


class Writer:
    """Plans samples (`plan`), and lets the target write them (`write`).

    texts: the texts from which passages are cut. questions: the questions with which conversations begin; questions
    that are too long are left out. If there are no questions, the target also writes the questions. begun: the options
    of the file to which samples are added (samples.begun_with). The frame in these options is used again, because some
    templates print the current date. Raises BadOption for texts, questions or a template that do not fit the shares,
    and NotFound if a template is needed and the model has no template.
    """

    def __init__(
        self,
        llm: LLM,
        texts: Seq[str],
        questions: Seq[str] = (),
        *,
        seed: int,
        shares: Shares,
        lengths: Lengths,
        begun: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.llm, self.seed, self.shares, self.lengths = llm, seed, shares, lengths
        self.frame = Frame()
        if shares.chat + shares.task > 0:
            known = begun.get("frame", ())
            self.frame = Frame(*map(tuple, known)) if any(known) else Frame.of_model(llm)
        self._writes_frame = not begun or "frame" in begun  # older files have no frame
        if questions and shares.chat == 0:
            raise BadOption("questions begin conversations, and --chat 0 writes none: leave one of them out")
        self.questions = self._short_enough(questions)
        if shares.chat > 0 and not self.questions and not self.frame.before:
            raise BadOption(
                "the chat template puts nothing before a user's turn, so that no question can be begun: sample with "
                "--chat 0"
            )
        self.texts = texts if shares.task + shares.text > 0 else []
        self._first_ids = first_ids(llm.tokenizer)
        self._sizes = np.cumsum([len(text) for text in self.texts])
        if shares.task + shares.text > 0 and not len(self._sizes):
            raise BadOption("there is no text to cut passages from: name some with --text, or sample with --chat 1")

    def options(self) -> dict[str, Any]:
        """Return everything that a sample depends on, except its number. These options are written to the file."""
        llm = self.llm
        frame = {"frame": [list(self.frame.before), list(self.frame.after)]} if self._writes_frame else {}
        options = {
            "num_ids": llm.tokenizer.num_ids,
            "tokenizer": llm.tokenizer.fingerprint,
            "weights": fingerprint(llm.checkpoint.model),
            "precision": llm.checkpoint.model.precision,
            "seed": self.seed,
            **vars(self.shares),
            "passage_tokens": list(self.lengths.passage),
            "question_tokens": self.lengths.question,
            "answer_tokens": self.lengths.answer,
            "texts": _digest(self.texts),
        }
        asked = {"questions": _digest(self.questions)} if self.questions else {}
        return options | frame | asked

    def plan(self, number: int) -> Plan:
        """Return the plan of the sample with this number. The plan depends only on the number and the options."""
        rng = random.Random(f"{self.seed} {number}")
        kind = self.shares.kind(rng.random())
        temperature = rng.choice(TEMPERATURES)
        seed = rng.getrandbits(63)
        prompt = self.frame.before
        if kind == "chat" and self.questions:
            prompt = (*prompt, *self._encode(self.questions[number % len(self.questions)]), *self.frame.after)
        if kind != "chat":
            passage = self._passage(rng, rng.randint(*self.lengths.passage))
            prompt = (*self._first_ids, *passage)
            if kind == "task":
                tokenizer = self.llm.tokenizer
                whole = rng.choice(INSTRUCTIONS).format(tokenizer.decode(passage))
                inside = tokenizer.encode(whole, add_special_tokens=False)
                prompt = (*self.frame.before, *inside, *self.frame.after)
        return Plan(number, kind, temperature, seed, prompt)

    def write(
        self,
        out: SampleWriter,
        num_tokens: int,
        batch_size: int,
        say: Callable[[SampleWriter], None] = lambda w: None,
        recording: Recording | None = None,
    ) -> None:
        """Let the target write samples, and append them to `out` until the file has `num_tokens` ids.

        batch_size: the number of texts that are written at once. say: called after each sample. recording: stores the
        features of the samples in a folder. Raises BadOption if the texts have too few different passages, or if there
        are too few questions.
        """
        ended = SimpleQueue[tuple[int, Request]]()
        planned, answers = dict[int, Plan](), dict[int, int]()
        done: dict[int, tuple[Sample, Features | None]] = {}
        going = dict[int, Request]()
        next_number, num_repeated = out.next_number, 0
        places = batch_size + -(-batch_size // 4)  # more than fit, so that no place in the batch is empty for a step

        def start(number: int, prompt: Seq[int], params: SamplingParams) -> None:
            def hear(request: Request) -> None:
                seq = request.seq
                if seq.finish_reason is not None:
                    ended.put((number, request))
                elif len(seq.tokens) % LOOK_EVERY == 0 and looped(seq.tokens, seq.num_prompt_tokens) is not None:
                    self.llm.end([request])

            (going[number],) = self.llm.submit([list(prompt)], params, hear=hear)

        try:
            while out.num_tokens < num_tokens:
                while len(going) < places and next_number < out.next_number + WINDOW * batch_size:
                    plan = planned[next_number] = self.plan(next_number)
                    start(next_number, plan.prompt, self._first(plan))
                    next_number += 1
                number, request = ended.get()
                del going[number]
                if request.error is not None:
                    raise request.error
                plan, ids = planned[number], request.seq.tokens
                end = looped(ids, request.seq.num_prompt_tokens)
                features = None if recording is None else recording.take(request.seq.id, len(ids[:end]))
                ids = ids[:end]
                has_ended = end is None and request.seq.finish_reason == "stop"
                if self._asks(plan) and number not in answers and has_ended:
                    answers[number] = len(ids) - 1 + len(self.frame.after)
                    start(number, [*ids[:-1], *self.frame.after], self._answer(plan))
                    continue
                given = len(plan.prompt)
                answer_at = answers.pop(number, len(ids) if self._asks(plan) else given)
                del planned[number]
                written = np.array(ids, dtype=np.uint32)
                done[number] = Sample(number, plan.kind, plan.temperature, given, answer_at, written), features
                while out.next_number in done and out.num_tokens < num_tokens:
                    (sample, recorded), end = done.pop(out.next_number), out.num_tokens
                    is_new = out.append(sample)
                    num_repeated = 0 if is_new else num_repeated + 1
                    # After the sample: features that a kill loses are computed by the next run.
                    if is_new and recording is not None and recorded is not None:
                        recording.write(end, recorded)
                    say(out)
                if num_repeated > MOST_REPEATED:
                    raise BadOption(
                        "the texts have too few different passages, or there are too few questions: name more of them, "
                        "or lower num_tokens"
                    )
        finally:
            self.llm.end(list(going.values()))

    def _first(self, plan: Plan) -> SamplingParams:
        answer = self._answer(plan)
        if not self._asks(plan):
            return answer
        return replace(answer, max_tokens=self.lengths.question, min_tokens=2, temperature=1.0)

    def _answer(self, plan: Plan) -> SamplingParams:
        return SamplingParams(max_tokens=self.lengths.answer, temperature=plan.temperature, seed=plan.seed)

    def _asks(self, plan: Plan) -> bool:
        """Return whether the target also writes the question of the planned sample."""
        return plan.kind == "chat" and not self.questions

    def _encode(self, text: str) -> list[int]:
        return self.llm.tokenizer.encode(text, add_special_tokens=False)

    def _short_enough(self, questions: Seq[str]) -> list[str]:
        """Return the questions with at most lengths.question tokens, shuffled.

        Raises BadOption if all questions are too long.
        """
        most = self.lengths.question
        short = [text for text in questions if len(self._encode(text)) <= most]
        if questions and not short:
            raise BadOption(f"no question has at most {most} tokens: name others, or raise --question-tokens")
        if len(short) < len(questions):
            LOG.warning("%d of %d questions are left out: they have over %d tokens (--question-tokens)",
                        len(questions) - len(short), len(questions), most)  # fmt: skip
        random.Random(self.seed).shuffle(short)
        return short

    def _passage(self, rng: random.Random, num: int) -> list[int]:
        """Return a random passage of `num` ids from one of the texts. The passage begins at the beginning of a line.

        The passage has fewer ids if the text ends earlier.
        """
        at = rng.randrange(int(self._sizes[-1]))
        which = int(np.searchsorted(self._sizes, at, side="right"))
        text = self.texts[which]
        start = text.rfind("\n", 0, at - int(self._sizes[which]) + len(text)) + 1
        return self.llm.tokenizer.encode(text[start : start + 12 * num], add_special_tokens=False)[:num] or [0]


def _digest(texts: Seq[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def looped(ids: Seq[int], start: int) -> int | None:
    """Return the first index in `ids` at which a part has been repeated too often in a row; None = no such index.

    Only ids from `start` on are read. A part may have any length in PERIODS. See `_repeats`.
    """
    written = np.asarray(ids[start:])
    ends = [end for period in PERIODS if (end := _repeats(written, period)) is not None]
    return start + min(ends) if ends else None


def _repeats(ids: NDArray[np.int64], period: int) -> int | None:
    """Return the first index at which `period` ids have been repeated too often in a row; None = no such index.

    Too often means REPEATED times, and at least LEAST_REPEATED ids in all.
    """
    wanted = max((REPEATED - 1) * period, LEAST_REPEATED - period)  # ids in a row that equal the id one period later
    if len(ids) < period + wanted:
        return None
    is_same = np.concatenate(([0], np.cumsum(ids[period:] == ids[:-period])))
    places = np.flatnonzero(is_same[wanted:] - is_same[:-wanted] == wanted)
    return int(places[0]) + period + wanted if len(places) else None


def first_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that a tokenizer adds before a text, such as a begin-of-sequence id; () if it adds no ids."""
    whole, bare = (tokenizer.encode("a", add_special_tokens=special) for special in (True, False))
    num = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    return tuple(whole[:num])


def longest(lengths: Lengths) -> int:
    """Return an upper limit for the number of tokens in a sequence with the given limits, chat template included."""
    return max(lengths.question, 2 * lengths.passage[1] + 64) + lengths.answer + 256
