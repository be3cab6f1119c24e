"""Two servers share a folder of --kv-disk under load, with room for a part of what is asked: texts stay what they are.

Each writes, reads what the other has written, and removes segments that the other is reading. Times of files are set
into the future and the past meanwhile, as a clock that jumps leaves them.
"""

import os
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.kv.disk import LEAST_BYTES, kept
from forerun.kv.segments import ROWS
from serve.running import Running, serving
from tiny import write_tiny

pytestmark = pytest.mark.once("it is about the folder, not about drafts")
PROMPT_TOKENS, NUM_PROMPTS, NUM_TURNS = 1_500, 18, 2  # all prompts have 93 MB of rows; the folder holds 64
OPTIONS = {"dtype": "float32", "draft": "none", "max_seq_len": 1_600, "max_batch_size": 2, "kv_cache_tokens": 3_400}
FLAGS = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
YEAR_S = 365 * 86_400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose rows are large beside its weights."""
    return write_tiny(
        tmp_path_factory.mktemp("model") / "m", max_positions=2_048, num_layers=32, inner_scale=0.05, seed=5
    )


def prompts() -> list[str]:
    """Texts of code, every third of which begins as the one before."""
    made = list[str]()
    for number in range(NUM_PROMPTS):
        head = made[-1][: PROMPT_TOKENS // 2] if number % 3 == 2 else ""
        lines = "".join(f"def f{number}_{i}(x):\n    return x * {i * 37 % 1009}\n" for i in range(60))
        made.append((head + lines)[:PROMPT_TOKENS])
    return made


def ask(server: Running, prompt: str) -> tuple[str, int]:
    """The answer of a server, and how many tokens it had from disk."""
    answer = server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 6, "temperature": 0})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    return said["choices"][0]["text"], said["usage"]["prompt_tokens_details"].get("disk_tokens", 0)


def wrong_times(folder: Path) -> None:
    """Set the times of some segments a year ahead, and of some back to 1970."""
    for number, file in enumerate(sorted(folder.glob(f"*/*{ROWS}"))):
        with suppress(FileNotFoundError):  # a server has just removed it
            os.utime(file, (0, 0) if number % 2 else (time.time() + YEAR_S,) * 2)


@contextmanager
def watched(folder: Path) -> Iterator[set[Path]]:
    """Give the segments that are there at any moment until the end: a server may write most of them when it ends."""
    segments, ended = set[Path](), threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            with suppress(FileNotFoundError):  # the folder of a shelf is not there yet
                segments.update(folder.glob(f"*/*{ROWS}"))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield segments
    finally:
        ended.set()
        looking.join()


def test_two_servers_share_a_small_folder(model: Path, tmp_path: Path) -> None:
    texts, chance = prompts(), random.Random(3)
    with LLM(model, **OPTIONS) as plain:
        outs = plain.generate(texts, SamplingParams(max_tokens=6, temperature=0), raw=True)
        wanted = {text: out.text for text, out in zip(texts, outs, strict=True)}
    folder, found = tmp_path / "kv", 0
    start = partial(serving, *FLAGS, "--kv-disk", f"{LEAST_BYTES / 1e6}MB:{folder}", target=str(model))
    with watched(folder) as segments, start() as one, start() as two:
        for turn in range(NUM_TURNS):
            # Both ask the same at the same time at first, then each other texts.
            orders = [texts, texts if turn == 0 else chance.sample(texts, len(texts))]
            with ThreadPoolExecutor(4) as pool:
                answers = [
                    (text, pool.submit(ask, server, text))
                    for pair in zip(*orders, strict=True)
                    for server, text in zip((one, two), pair, strict=True)
                ]
                for number, (text, answer) in enumerate(answers):
                    said, num = answer.result()
                    assert said == wanted[text]
                    found += num
                    if number % 6 == 0:
                        wrong_times(folder)
        for server in (one, two):
            assert server.is_idle()
            assert server.terminate() == 0
            assert not re.findall("Traceback|was not written|damaged", server.log)
    assert any(not file.exists() for file in segments), "none was removed"
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert num_bytes <= LEAST_BYTES + 2 * LEAST_BYTES // 8, "of each server one segment that it has just begun"
    assert sum(one.num_damaged for one in kept(folder, verifies=True)) == 0
    assert found > 0, "nothing was found on disk"


def test_a_server_starts_behind_a_clock_that_was_wrong(model: Path, tmp_path: Path) -> None:
    """What is there is found, listed and verified, whatever its times are, and new texts are kept."""
    text, other = prompts()[:2]
    start = partial(serving, *FLAGS, "--kv-disk", f"1GB:{tmp_path / 'kv'}", target=str(model))
    for ahead_s in (YEAR_S, -80 * YEAR_S):
        with start() as server:
            first = ask(server, text)
            assert server.terminate() == 0
        for file in (tmp_path / "kv").rglob("*"):
            os.utime(file, (time.time() + ahead_s,) * 2)
        (one,) = kept(tmp_path / "kv", verifies=True)
        assert (one.num_blocks > 0, one.num_damaged) == (True, 0)
        with start() as server:
            again, num = ask(server, text)
            assert (again, num) == (first[0], (PROMPT_TOKENS - 1) // 16 * 16)
            ask(server, other)
            assert server.terminate() == 0
        assert kept(tmp_path / "kv")[0].num_blocks >= one.num_blocks
