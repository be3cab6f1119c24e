"""Lets a target write texts to a file until the file has a given number of tokens, for `forerun train sample`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from forerun.engine.llm import LLM
from forerun.train.config import SampleConfig
from forerun.train.evaluate import counted
from forerun.train.questions import read_questions
from forerun.train.recording import Recording
from forerun.train.samples import SampleWriter, begun_with, read_samples
from forerun.train.stopping import Stopped
from forerun.train.texts import packaged_texts, read_texts
from forerun.train.writing import Frame, Lengths, Shares, Writer, longest

MAX_TEXT_BYTES = 10**8  # of the texts that passages are cut from


@dataclass(frozen=True)
class Progress:
    """Describes the progress of a run.

    num_tokens: the number of tokens in the file. num_new: the number of tokens that this run wrote, in `seconds`.
    """

    num_tokens: int
    num_new: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_new / self.seconds


def write(
    config: SampleConfig,
    target: str | None,
    show: Callable[[Progress], None],
    *,
    tell: Callable[[str], None] = lambda text: None,
    dtype: str,
    ops: str,
    recording: Recording | None = None,
) -> Progress:
    """Let a target write samples until the file config.out has config.num_tokens tokens. Returns the progress.

    show: called after each sample. tell: called with a text that says what takes time before the first sample.
    recording: see `Writer.write`. Raises UserError if the file was begun with other options, and if there are too few
    texts or questions. Raises Stopped for Ctrl-C once the file is open.
    """
    questions = read_questions(config.questions)
    tell("loading the target")
    lengths = Lengths((16, config.passage_tokens), config.question_tokens, config.answer_tokens)
    with LLM(
        target,
        draft="none" if recording is None else recording.make,
        max_batch_size=config.batch_size,
        max_seq_len=longest(lengths),
        max_num_batched_tokens=max(1024, config.batch_size),
        calibrate=False,
        dtype=dtype,
        ops=ops,
    ) as llm:
        shares = shares_of(config, llm)
        tell("reading texts to cut passages from")
        texts = texts_for(config, shares)
        writer = Writer(
            llm, texts, questions, seed=config.seed, shares=shares, lengths=lengths, begun=begun_with(config.out)
        )
        file = SampleWriter(config.out, writer.options())
        start, had = time.perf_counter(), file.num_tokens
        tell("writing the first texts")
        end = llm.listen(counted(lambda num: tell(f"writing the first texts, {num:,} tokens so far")))

        def progress(file: SampleWriter) -> Progress:
            return Progress(file.num_tokens, file.num_tokens - had, time.perf_counter() - start)

        def look(file: SampleWriter) -> None:
            end()
            show(progress(file))

        try:
            if recording is not None:
                recording.begin(llm, read_samples(config.out))
                start = time.perf_counter()
            writer.write(file, config.num_tokens, config.batch_size, look, recording)
        except KeyboardInterrupt:
            if not file.num_tokens:
                raise
            raise Stopped(f"{file.num_tokens:,} tokens") from None
        finally:
            file.close()
        return progress(file)


def texts_for(config: SampleConfig, shares: Shares) -> list[str]:
    """Return the texts from which passages are cut: config.texts, or else installed texts if passages are needed."""
    if config.texts:
        return list(read_texts(config.texts, MAX_TEXT_BYTES))
    return packaged_texts() if shares.task + shares.text > 0 else []


def shares_of(config: SampleConfig, llm: LLM) -> Shares:
    """Return the shares of the three kinds of text. Shares that `config` does not set get default values.

    By default, the share of chat is 0 if no questions are given and the chat template opens no user's turn.
    """
    chat = config.chat
    task = config.task
    if chat is None:
        chat = Shares.chat if config.questions or Frame.opens_a_turn(llm) else 0.0
    if task is None:
        task = (1 - chat) / 2 if chat > 0 else 0.0
    return Shares(chat, task, 1 - chat - task)
