"""Runs `forerun batch`: answers a file of requests in OpenAI's batch format, by continuous batching.

The input is read twice: first to check all requests, and then request by request, whenever the engine has room for
more. Each answer is appended as soon as it is complete, so the output has the order in which requests finish. If a run
ends early for any reason, the next run continues after the answers in the output. The engine is imported only after the
input has passed the check.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from forerun.config import EngineConfig
from forerun.errors import CapacityError, InternalError, UserError, shown
from forerun.models.named import default
from forerun.serve.answers import AnswerFile, answer_id, some_of
from forerun.serve.apis import batched
from forerun.serve.bodies import Job, Prompt, Refused, model_names
from forerun.serve.progress import Progress
from forerun.serve.requests import BatchRequest, RequestFile
from forerun.serve.routes import plain_error
from forerun.serve.texts import form_of, templated
from forerun.text.filling import filling_ids
from forerun.text.terminal import note, visible

if TYPE_CHECKING:
    from forerun.engine.llm import LLM
    from forerun.engine.opened import Opened
    from forerun.engine.request import Request
    from forerun.types import StepReport

LOG = logging.getLogger(__name__)
# These end the run. Anything else becomes the error of one line, for a panic of a tokenizer's Rust code is no
# Exception.
_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)
ALL_ANSWERED, SOME_REFUSED = 0, 2  # exit codes; 2 means errors that the caller can mend
WINDOW_BATCHES = 4  # requests in the engine at most, in batches: the scheduler always has some to choose from
# A Run answers requests (see `Runner.run`). A Place yields the Run of an engine, which is here or on a cluster.
Run: TypeAlias = Callable[[Iterator[BatchRequest], AnswerFile, Callable[[], None]], None]
Place: TypeAlias = "Callable[[EngineConfig, Seq[str], Numbers], AbstractContextManager[Run]]"
Loading: TypeAlias = "Callable[[Opened], AbstractContextManager[object]]"
SEED_BITS = 53  # of a seed that the request does not give: every JSON reader keeps such an integer exactly


def run(
    input_path: Path,
    output_path: Path,
    config: EngineConfig,
    *,
    served_names: Seq[str] = (),
    redo_changed: bool = False,
    retry_refused: bool = False,
    place: Place | None = None,
) -> int:
    """Answer every request of the input that has no answer in the output yet. Returns the exit code.

    served_names: the names that requests may give the model; () = any name. Answers have the first name. redo_changed:
    whether to repeat requests that have changed since they were answered. retry_refused: whether to repeat requests
    that were refused. place: where the engine runs; None = in this process.

    Raises UserError, before anything is run, for a malformed input, for an output that belongs to another input, for
    changed requests without redo_changed, and for options that cannot be honoured. Raises KeyboardInterrupt after
    printing how to continue.
    """
    requests = RequestFile(input_path)
    num_lines = len(requests.line_of)
    with AnswerFile(output_path) as answers:
        answers.recover(requests.digest_of, redo_changed=redo_changed, retry_refused=retry_refused)
        if answers.dropped:
            note(f"asked again: {some_of(answers.dropped)}")
        if answers.refused:
            note(_first_refusal(answers))
        if answers.num_unmarked:
            note(
                f"answers that do not say what was asked, of an earlier version: {answers.num_unmarked:,}; whether "
                "these requests have changed is not known"
            )
        num_before, numbers = len(answers.finished), Numbers()
        try:
            if num_before < num_lines:
                _answer(requests, answers, config, served_names, numbers, place or in_this_process)
        except KeyboardInterrupt:
            done = f"{len(answers.finished):,} of {num_lines:,} requests have their answer"
            note(f"stopped: {done}; the same command goes on from here")
            raise
        note(numbers.summary(num_lines, num_before, len(answers.refused)))
    return SOME_REFUSED if answers.refused else ALL_ANSWERED


def seed_of(custom_id: str) -> int:
    """Return the seed for a request whose body has no seed.

    The seed depends only on custom_id, so that a resumed run gives the same answer.
    """
    digest = hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


@dataclass
class Numbers:
    """Counts the tokens that a run generates, and measures the run's time. Called with the StepReport of each step."""

    started_s: float = field(default_factory=time.perf_counter)
    num_tokens: int = 0

    def __call__(self, report: StepReport) -> None:
        self.num_tokens += report.num_committed

    @property
    def tokens_per_s(self) -> float:
        """The number of generated tokens per second since the model was loaded."""
        return self.num_tokens / max(time.perf_counter() - self.started_s, 1e-9)

    def summary(self, num_lines: int, num_before: int, num_refused: int) -> str:
        """Return a line such as [100 requests: 98 answered, 2 refused; 40 of them before; 5,120 tokens ...]."""
        noun = "request" if num_lines == 1 else "requests"
        parts = [f"{num_lines:,} {noun}: {num_lines - num_refused:,} answered, {num_refused:,} refused"]
        parts += [f"{num_before:,} of them before"] if num_before else []
        seconds = time.perf_counter() - self.started_s
        if self.num_tokens:
            parts.append(f"{self.num_tokens:,} tokens in {seconds:.1f} s, {self.tokens_per_s:.1f} tokens/s")
        parts += ["--retry-refused asks the refused ones again"] if num_refused else []
        return f"[{'; '.join(parts)}]"


@dataclass
class Running:
    """A request of the file, with the engine requests that generate its choices (outputs)."""

    asked: BatchRequest
    job: Job
    choices: list[Request]

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended, or any choice has failed."""
        return any(c.error is not None for c in self.choices) or all(
            c.seq.finish_reason is not None for c in self.choices
        )


class Requests:
    """Converts the requests of a file to engine requests, and ended engine requests to answers.

    name: the model's name in answers. served_names: the names that bodies may give the model, see `Generate.job`.
    defaults: values for the fields of SamplingParams that a body leaves out.
    """

    def __init__(self, llm: LLM, name: str, served_names: Seq[str], defaults: Mapping[str, Any]) -> None:
        self.llm, self._name, self._served_names, self._defaults = llm, name, served_names, defaults

    def start(self, request: BatchRequest, hear: Callable[[Request], None]) -> Running | dict[str, Any]:
        """Queue a request in the engine, and return a Running. If the request is refused, return the output line.

        hear: called with an engine request after each step that advances the request, and at its end.
        """
        try:
            return self._start(request, hear)
        except (UserError, CapacityError) as error:
            return _answer_line(request, *plain_error(error))
        except RecursionError:  # one bad request must not stop the others
            too_deep = Refused("the body is nested too deeply to be read: make it flatter")
            return _answer_line(request, *plain_error(too_deep))
        except _ENDS:
            raise
        except BaseException as error:
            return _failed_line(request, error)

    def _start(self, request: BatchRequest, hear: Callable[[Request], None]) -> Running:
        defaults = {**self._defaults, "seed": seed_of(request.custom_id)}
        job = batched()[request.url].job(request.body, self._name, defaults, self._served_names)
        job = dataclasses.replace(job, report=True)
        if job.stream:
            raise Refused("stream=true is not possible: a batch writes whole answers; leave it out", "stream")
        prompts: list[Prompt] = list(job.prompts)
        if job.suffix is not None:
            prompts = [filling_ids(self.llm.tokenizer, str(job.prompts[0]), job.suffix)]
        if job.messages is not None:
            job = templated(job, lambda: self.llm.chat_template)
            prompts = [self.llm.apply_chat_template(job.messages or [], **form_of(job))]
        return Running(
            request, job, self.llm.submit(prompts, job.params, raw=True, hear=hear, answer_form=job.answer_form)
        )

    def answer(self, running: Running) -> dict[str, Any]:
        """Return the output line of a request whose engine requests have ended."""
        error = next((choice.error for choice in running.choices if choice.error is not None), None)
        if error is not None:
            self.llm.end(running.choices)
            return _answer_line(running.asked, *plain_error(error))
        try:
            body = batched()[running.asked.url].answer(
                running.job,
                [choice.output() for choice in running.choices],
                self.llm.tokenizer,
                secrets.token_hex(12),
                int(time.time()),
            )
        except _ENDS:
            raise
        except BaseException as cause:
            return _failed_line(running.asked, cause)
        return _answer_line(running.asked, 200, body)


class Runner:
    """Keeps about `window` choices (outputs) running in an engine, and writes the answers to ended requests."""

    def __init__(self, requests: Requests, window: int) -> None:
        self._requests, self._window = requests, window
        self._running: list[Running] = []
        self._news: SimpleQueue[Request] = SimpleQueue()

    def run(self, requests: Iterator[BatchRequest], answers: AnswerFile, on_step: Callable[[], None]) -> None:
        """Answer all requests, and append each answer to the file `answers` once the answer is complete.

        on_step: called each time the engine has reported progress and the complete answers have been written.
        """
        try:
            while True:
                refused = self._fill(requests)
                if self._running:
                    self._news.get()
                    while not self._news.empty():
                        self._news.get()
                elif not refused:
                    return
                answers.append([*refused, *self._land()])
                on_step()
        except KeyboardInterrupt:
            answers.append(self._land())
            raise
        finally:
            self._requests.llm.end([choice for running in self._running for choice in running.choices])

    def _fill(self, requests: Iterator[BatchRequest]) -> list[dict[str, Any]]:
        """Start requests until the window is full. Returns the output lines of requests that were refused."""
        refused: list[dict[str, Any]] = []
        num_running = sum(len(running.choices) for running in self._running)
        while num_running < self._window and len(refused) < self._window:
            request = next(requests, None)
            if request is None:
                break
            started = self._requests.start(request, self._news.put)
            if isinstance(started, Running):
                self._running.append(started)
                num_running += len(started.choices)
            else:
                refused.append(started)
        return refused

    def _land(self) -> list[dict[str, Any]]:
        """Return the output lines of the requests that have ended.

        The Runner forgets these requests before their answers are written, so that no answer is written twice.
        """
        over = [running for running in self._running if running.is_over]
        if over:
            self._running = [running for running in self._running if not running.is_over]
        return [self._requests.answer(running) for running in over]


def load(config: EngineConfig, served_names: Seq[str], loading: Loading = nullcontext) -> Requests:
    """Load the model of a configuration, and return the Requests for the model.

    served_names: see `run`. loading: returns a display that is shown while the model is loaded.
    """
    from forerun.engine.llm import LLM
    from forerun.engine.opened import Opened
    from forerun.memory.machine import spare_what_is_loaded

    opened = Opened.of(config)
    opened.text_tokenizer()  # the answers are texts
    with loading(opened):
        llm = LLM.from_opened(opened)
        llm.measure_passes()
    spare_what_is_loaded()
    return Requests(llm, (*served_names, *model_names(config.target or default()))[0], served_names, llm.usual_fields)


@contextmanager
def in_this_process(
    config: EngineConfig, served_names: Seq[str], numbers: Numbers, loading: Loading = nullcontext
) -> Iterator[Run]:
    """Load an engine in this process. Yield the function (a Run) that answers requests with the engine.

    served_names: see `run`. numbers: gets the report of each step. loading: see `load`.
    """
    requests = load(config, served_names, loading)
    numbers.started_s = time.perf_counter()
    end = requests.llm.listen(numbers)
    try:
        yield Runner(requests, WINDOW_BATCHES * config.max_batch_size).run
    finally:
        end()


def _first_refusal(answers: AnswerFile) -> str:
    return f"{answers.refused[0]!r:.80} was refused: {' '.join(visible(answers.first_reason).split())}"


def _answer(
    requests: RequestFile,
    answers: AnswerFile,
    config: EngineConfig,
    served_names: Seq[str],
    numbers: Numbers,
    place: Place,
) -> None:
    """Load the model, and answer the requests that have no answer yet.

    served_names, place: see `run`. numbers: gets the report of each step of the engine.
    """
    from forerun.engine.opened import Opened

    if requests.has_chats:
        _ = Opened.of(config).chat_template  # raises where there is none
    with place(config, served_names, numbers) as run_there:
        own_names = model_names(config.target or default())
        if not served_names and (others := sorted(requests.models.difference(own_names))):
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            note(
                f"requests that ask for the model {shown(others[0])}{more} are answered by {visible(own_names[0])}; "
                "--served-model-name NAME would refuse other names"
            )
        missing = (request for request in requests if request.custom_id not in answers.finished)
        with Progress(len(requests.line_of), len(answers.finished)) as progress:
            is_refusal_shown = bool(answers.refused)

            def on_step() -> None:
                nonlocal is_refusal_shown
                if answers.refused and not is_refusal_shown:
                    progress.say(_first_refusal(answers))
                    is_refusal_shown = True
                progress.show(len(answers.finished), numbers.tokens_per_s)

            run_there(missing, answers, on_step)


def _failed_line(asked: BatchRequest, error: BaseException) -> dict[str, Any]:
    """Return the output line of a request that failed in an unforeseen way, and log the error.

    The other requests are still answered.
    """
    LOG.error("request %s failed", shown(asked.custom_id), exc_info=error)
    failed = InternalError(f"the text of the request or its answer could not be made: {error!r:.200}")
    return _answer_line(asked, *plain_error(failed))


def _answer_line(asked: BatchRequest, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return one output line. The line begins with the id, by which answers.py recognises the lines of a batch."""
    response = {"status_code": status, "request_id": f"req_{secrets.token_hex(12)}", "body": body}
    return {"id": answer_id(asked.digest), "custom_id": asked.custom_id, "response": response, "error": None}
