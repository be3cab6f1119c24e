"""`forerun bench suite`: plain decoding and the default drafting on a public benchmark, prefill included.

Each conversation gets a fresh engine, as a user's first request does. Otherwise drafters that search the text would
find their earlier answer when the same question is asked again. Each conversation is answered with every way of
drafting and twice with plain decoding, one after another. The order rotates, because a shared machine is faster in one
minute than in the next. A kind of work is measured again if the speeds of the two plain answers differ by more than
`NOISE`, in the median over the kind. Where the rule must keep the text of plain decoding, the two texts are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.progress import Progress

from forerun import pacing, verify
from forerun.bench import latency, suites
from forerun.bench.exhibits import check_picture
from forerun.bench.latency import ForwardClock, loaded_once, progress_bar
from forerun.bench.methods import chats, compare, conversation_ids, counted, named_ways, print_compared, same, title_of
from forerun.bench.methods_picture import draw
from forerun.bench.methods_results import AGAIN, PLAIN, Cell, cells_of, print_results, summaries_of
from forerun.bench.plans import SuitePlan, Way
from forerun.bench.results import Tally, Variant, print_ceiling, record_of
from forerun.bench.suites import Conversation, Suite
from forerun.bench.widen import load_widened, measured_target
from forerun.config import EngineConfig
from forerun.engine.llm import LLM
from forerun.engine.prompts import Message
from forerun.errors import BadOption, InternalError, UserError, shown
from forerun.memory.machine import spare_what_is_loaded
from forerun.models.loading import Checkpoint
from forerun.ops.model import LoadedModel
from forerun.text.terminal import make_console
from forerun.text.waiting import Waiting
from forerun.types import SamplingParams, StepReport

NOISE = 0.03  # of plain decoding against itself; kinds of work with more noise are run again
WARM_UP_TOKENS = 16


@dataclass
class Run:
    """The measurements of one way of drafting on one conversation.

    Seconds and tokens are sums over the turns of the conversation. Each turn has one answer.
    """

    conversation: str
    kind: str
    way: str
    temperature: float
    seconds: float = 0.0
    first_token_s: float = 0.0
    num_tokens: int = 0
    num_first_tokens: int = 0  # tokens that came with the first pass of each turn, which may emit several
    num_passes: int = 0
    texts: list[list[int]] = field(default_factory=list)  # the token ids of each turn's answer
    steps: list[StepReport] = field(default_factory=list)
    draft_forward_s: list[float] = field(default_factory=list)  # of each step

    def record(self) -> dict[str, Any]:
        """Return the fields that go into the JSON record, by name."""
        return {name: value for name, value in vars(self).items() if name not in ("texts", "steps", "draft_forward_s")}

    def add_to(self, tally: Tally, *, is_whole: bool) -> None:
        """Add the run to a tally.

        is_whole: whether to add the tokens and seconds of whole answers. If False, the tokens and the seconds up to the
        end of the first step that emits tokens are left out of every answer.
        """
        seconds, num = self.seconds, self.num_tokens
        if not is_whole:
            seconds, num = seconds - self.first_token_s, num - self.num_first_tokens
        tally.seconds_per_token.append(seconds / max(1, num))
        tally.num_tokens.append(num)
        tally.steps += self.steps
        tally.draft_forward_s += self.draft_forward_s


def run(config: EngineConfig, plan: SuitePlan, name: str) -> dict[str, Any]:
    """Measure, print tables, and return the results for JSON.

    Raises UserError where the measurement is impossible, and InternalError where a drafter fails or changes a text.
    """
    console = make_console()
    check_picture(plan.picture)
    suite = suites.read(name, plan.prompt_file).first(plan.num_prompts, plan.prompts_per_kind, plan.kinds)
    ways = ways_of(config, plan)
    checkpoint = load_widened(measured_target(config, "none"), "none", console)
    drafts = {way.draft: loaded_once(way.draft, checkpoint, config.ignored_config_keys) for way in ways}
    measuring = Measuring(checkpoint, config, plan, suite, ways, drafts)
    with Waiting("checking the conversations"):
        measuring.check()
    spare_what_is_loaded()
    ceiling = print_ceiling(checkpoint.model, console)
    sizes = f"{counted(len(suite.conversations), 'conversation')}, at most {plan.max_tokens} tokens a turn"
    console.print(
        f"{suite.title} (licence: {suite.licence}): {sizes}{same(ways)}: plain decoding and "
        f"{counted(len(ways), 'way')} of drafting in turns, each conversation in engines of its own"
    )
    with progress_bar() as progress:
        measuring.run(progress)
    whole, behind = measuring.cells(is_whole=True), measuring.cells(is_whole=False)
    summaries = summaries_of(measuring.tallies(is_whole=True), whole)
    behind_summaries = summaries_of(measuring.tallies(is_whole=False), behind)
    parts = {"whole requests": (whole, summaries), "behind the first token": (behind, behind_summaries)}
    print_results(parts, suite.kinds, "draft", console)
    for kind, num in measuring.num_rounds.items():
        if num > 1:
            console.print(f"{kind} was run {num} times, for plain decoding differed from itself by over {NOISE:.0%}.")
    print_compared(measuring.num_compared, ways, plan, checkpoint.model.ops, console)
    if plan.picture is not None:
        title = f"{suite.title}: {title_of(checkpoint, 'none', ceiling)}"
        draw(whole, summaries, suite.kinds, plan.picture, title, f"{sizes}{same(ways)}; whole requests.")
    return {
        "bench": "suite",
        "suite": suite.name,
        "title": suite.title,
        "licence": suite.licence,
        "target": checkpoint.name,
        "plan": plan.record(),
        "ways": [asdict(way) for way in ways],
        "spec_length": config.spec_length,
        "conversations": [conversation.id for conversation in suite.conversations],
        "rounds": measuring.num_rounds,
        "texts_compared": measuring.num_compared,
        **record_of([], checkpoint.model, measuring.draft_models, ceiling),
        "lines": [asdict(cell) for cell in whole],
        "summaries": [asdict(summary) for summary in summaries],
        "lines_behind_first": [asdict(cell) for cell in behind],
        "summaries_behind_first": [asdict(summary) for summary in behind_summaries],
        "runs": [run.record() for run in measuring.runs],
    }


def ways_of(config: EngineConfig, plan: SuitePlan) -> list[Way]:
    """Return the ways of drafting, named by the fields in which they differ. Raises BadOption for wrong options."""
    for spec in plan.pacings:
        pacing.make(spec, config.spec_length)
    for acceptance in plan.acceptances:
        verify.find(acceptance)
    ways = [
        Way("", draft, spec, acceptance)
        for draft in dict.fromkeys(plan.drafts or ("auto",))
        if draft != PLAIN
        for spec in plan.pacings or (config.pacing_spec,)
        for acceptance in plan.acceptances or (None,)
    ]
    if not ways:
        raise BadOption("there is nothing to compare with plain decoding: name a drafter with --draft, or none")
    return named_ways(ways, plan)


class Measuring:
    """The measurement of a suite: its runs, and the engines that answer the conversations."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        plan: SuitePlan,
        suite: Suite,
        ways: Seq[Way],
        drafts: Mapping[str, str | Checkpoint],
    ) -> None:
        self.checkpoint, self.config, self.plan, self.suite, self.drafts = checkpoint, config, plan, suite, drafts
        self.ways = [*(Way(name, PLAIN, config.pacing_spec) for name in (PLAIN, AGAIN)), *ways]
        self.runs, self.num_compared = list[Run](), 0
        self.num_rounds = dict.fromkeys(suite.kinds, 0)
        self.draft_models: list[LoadedModel] = []

    def engine(self, way: Way) -> LLM:
        """Return a fresh engine for a way of drafting. All engines share the loaded weights."""
        draft = self.drafts.get(way.draft, way.draft)
        options = {**self.config.options(), "draft": draft, "pacing": way.pacing, "extra_drafts": None}
        llm = LLM(self.checkpoint, **options)
        llm.engine.drafter.spares = False  # a drafter's error ends the measurement, or plain decoding would go on
        return llm

    def params(self, way: Way, temperature: float, number: int) -> SamplingParams:
        """Return the sampling parameters of an answer. number: the conversation's number, added to the seed."""
        return SamplingParams(
            max_tokens=self.plan.max_tokens,
            temperature=temperature,
            top_p=self.plan.top_p,
            seed=self.plan.seed + number,
            acceptance=way.acceptance,
        )

    def check(self) -> None:
        """Check every way of drafting on every conversation before anything is measured.

        Raises UserError where a way of drafting is impossible, or where a conversation is too long.
        """
        for way in self.ways:
            with self.engine(way) as llm:
                if not chats(llm):
                    raise BadOption("a suite needs a model that answers: this one has no chat template")
                if "tools" not in llm.chat_template.reads and any(one.tools for one in self.suite.conversations):
                    raise BadOption(
                        f"{self.suite.title} has tools, which this model's template does not know: name another"
                    )
                llm.measure_passes()  # once: the engines of all conversations share the result
                models = latency.draft_models([llm.engine.drafter.first])
                self.draft_models += [model for model in models if model not in self.draft_models]
                for conversation in self.suite.conversations:
                    ids = self._longest(llm, conversation)
                    for temperature in self.plan.temperatures:
                        try:
                            llm.engine.make(ids, self.params(way, temperature, 0))
                        except UserError as error:
                            raise type(error)(f"{conversation.id}: {error}") from error

    def _longest(self, llm: LLM, conversation: Conversation) -> list[int]:
        """Return a prompt that is as long as the last prompt of a conversation can become.

        Each earlier answer takes `max_tokens` tokens. One repeated token id stands for them, because only the length
        of the prompt matters.
        """
        messages = list[Message]()
        for turn in conversation.turns:
            messages += [*turn, {"role": "assistant", "content": ""}]
        ids = conversation_ids(llm, messages[:-1], conversation.tools)
        return ids + ids[-1:] * (self.plan.max_tokens * (len(conversation.turns) - 1))

    def run(self, progress: Progress) -> None:
        """Measure the conversations of every kind of work, each kind up to most_rounds times.

        A kind is measured again only while plain decoding's two answers to its conversations differ too much in speed.
        """
        kinds = self.suite.kinds
        num_asked = len(self.suite.conversations) * len(self.plan.temperatures) * len(self.ways)
        task = progress.add_task("measuring", total=num_asked)
        first, num_tokens = self.suite.conversations[0], min(WARM_UP_TOKENS, self.plan.max_tokens)
        self.ask(first, self.ways[0], self.plan.temperatures[0], 0, num_tokens)
        for _ in range(self.plan.most_rounds):
            for number, conversation in enumerate(self.suite.conversations):
                if conversation.kind in kinds:
                    for temperature in self.plan.temperatures:
                        self._ask_all(conversation, number, temperature, progress, task)
            for kind in kinds:
                self.num_rounds[kind] += 1
            again = [cell for cell in self.cells(is_whole=True) if cell.name == AGAIN]
            kinds = list(dict.fromkeys(cell.kind for cell in again if abs(cell.speedup - 1) > NOISE))
            if not kinds:
                break
            more = sum(one.kind in kinds for one in self.suite.conversations)
            progress.update(task, total=num_asked + more * len(self.plan.temperatures) * len(self.ways))

    def _ask_all(
        self, conversation: Conversation, number: int, temperature: float, progress: Progress, task: Any
    ) -> None:
        """Answer a conversation with every way of drafting, and compare the texts with plain decoding's texts.

        number: the conversation's number. task: the task of `progress` to advance.
        """
        texts = dict[str, list[list[int]]]()
        for way in latency.rotated(self.ways, len(self.runs) // len(self.ways)):
            progress.update(task, description=f"T={temperature:g} {conversation.id} {way.name}")
            answered = self.ask(conversation, way, temperature, number)
            self.runs.append(answered)
            if way.keeps_texts(temperature):
                texts[way.name] = answered.texts
            progress.advance(task)
        if self.checkpoint.model.ops.row_invariant:
            for i in range(len(conversation.turns)):
                turn = {name: answers[i] for name, answers in texts.items()}
                compare(turn, conversation.id, temperature, self.checkpoint.text_tokenizer)
                self.num_compared += len(turn) - 2

    def ask(
        self, conversation: Conversation, way: Way, temperature: float, number: int, most_tokens: int | None = None
    ) -> Run:
        """Let a new engine answer a conversation turn by turn, and return the measurements.

        number: the conversation's number, which is added to the seed. most_tokens: the most tokens of an answer; None =
        the plan's max_tokens.
        """
        asked = Run(conversation.id, conversation.kind, way.name, temperature)
        params = self.params(way, temperature, number)
        messages = list[Message]()
        if most_tokens is not None:
            params = replace(params, max_tokens=most_tokens)
        with self.engine(way) as llm:
            drafter = llm.engine.drafter.first
            runner = drafter.runner
            clock = None if runner is None or runner is llm.engine.runner else ForwardClock(runner)
            for turn in conversation.turns:
                messages += turn
                ids = conversation_ids(llm, messages, conversation.tools)
                text, reply = self._answer(llm, ids, params, asked, clock)
                asked.texts.append(text)
                messages.append({"role": "assistant", "content": reply})
            if llm.engine.drafter.first is not drafter:
                raise InternalError(
                    f"the drafter {shown(way.draft)} failed on {conversation.id}: what it raised is logged above"
                )
        return asked

    def _answer(
        self, llm: LLM, ids: list[int], params: SamplingParams, asked: Run, clock: ForwardClock | None
    ) -> tuple[list[int], str]:
        """Answer one turn, add the measurements to `asked`, and return the answer's token ids and text.

        ids: the token ids of the conversation up to this turn. clock: measures the time of the draft model's passes.
        """

        def note(report: StepReport) -> None:
            draft_s = clock.take() if clock is not None else 0.0
            if report.num_decoding:
                asked.steps.append(report)
                asked.draft_forward_s.append(draft_s)

        output, took = latency.answered(llm, ids, params, note)
        asked.seconds += took.seconds
        asked.first_token_s += took.first_s
        asked.num_tokens += len(output.token_ids)
        asked.num_first_tokens += took.num_first
        asked.num_passes += output.report.num_steps
        return output.token_ids, output.text

    def tallies(self, *, is_whole: bool) -> dict[tuple[float, str, str], Tally]:
        """Return the tallies of all runs, by temperature, kind and way. is_whole: as in `Run.add_to`."""
        tallies = {
            (t, kind, way.name): Tally(Variant(way.name, 0), t)
            for t in self.plan.temperatures
            for kind in self.suite.kinds
            for way in self.ways
        }
        for one in self.runs:
            one.add_to(tallies[one.temperature, one.kind, one.way], is_whole=is_whole)
        return tallies

    def cells(self, *, is_whole: bool) -> list[Cell]:
        """Return the cells of all runs. is_whole: as in `Run.add_to`."""
        return cells_of(self.tallies(is_whole=is_whole))
