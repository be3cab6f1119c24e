"""`benchmarks.kv_disk`: what --kv-disk gives behind a restart, how fast rows come back, and what kill -9 leaves.

A long prompt is read cold, then by new engines that find its rows on disk; the answers are compared. The rate at which
rows come back is set beside the rate at which the same files are read into memory. With --kills, processes write texts
with a small random model and are killed at random moments; afterwards every block is verified and every text compared.

    python -m benchmarks.kv_disk --target TARGET.gguf --tokens 20000
"""

import os
import random
import signal
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple, cast

import typer

from benchmarks.start import start
from forerun.bench.results import print_ceiling
from forerun.bench.tables import Column, table
from forerun.cli.bench import JsonFile, keep
from forerun.engine.llm import LLM
from forerun.kv import fetch_slot
from forerun.kv.cache import BlockCache
from forerun.kv.disk import kept
from forerun.kv.segments import ROWS
from forerun.text.terminal import make_console
from forerun.types import SamplingParams

SIZE, KILLED_SIZE = "64GB", "100MB"
IN_TURNS = 5
ANSWER = SamplingParams(temperature=0, max_tokens=8)
TEXT = "what was read once is never read again, neither in this process nor in the one that comes behind it"


@dataclass(frozen=True)
class Line:
    """One engine that was asked once. first_token_s: from the request's arrival."""

    start: str
    load_s: float
    first_token_s: float
    num_prompt_tokens: int
    num_disk_tokens: int
    is_same: bool


COLUMNS = (
    Column("start", "start"),
    Column("load\ns", "load_s", "{:.2f}"),
    Column("first token\ns", "first_token_s", "{:.3f}"),
    Column("prompt\ntokens", "num_prompt_tokens", "{:,}"),
    Column("from\ndisk", "num_disk_tokens", "{:,}"),
    Column("same\ntext", "is_same"),
)


def prompt(llm: LLM, num_tokens: int) -> list[int]:
    """Return the ids of a long text of code, as an agent's prompt may be."""
    text, number = "", 0
    while True:
        text += "".join(
            f"def f{n}(x, y={n % 7}):\n    return x * {n * 37 % 1009} - y\n\n" for n in range(number, number + 200)
        )
        number += 200
        if len(ids := llm.tokenizer.encode(text)) >= num_tokens:
            return ids[:num_tokens]


def options_of(draft: str, spec_length: int | None, num_tokens: int, folder: Path) -> dict[str, Any]:
    """The options of every engine."""
    made = {"draft": draft, "max_batch_size": 1, "max_seq_len": num_tokens + 64, "kv_disk": f"{SIZE}:{folder}"}
    return made | ({} if spec_length is None else {"spec_length": spec_length})


def asked(
    target: str, options: dict[str, Any], num_tokens: int, name: str, before: list[int] | None
) -> tuple[Line, list[int]]:
    """Load, ask, and close."""
    began = time.perf_counter()
    with LLM(target, **options) as llm:
        load_s = time.perf_counter() - began
        ids = prompt(llm, num_tokens)
        (out,) = llm.generate([ids], ANSWER)
        report = out.report
        assert report.first_token_at_s is not None
        first_s = report.first_token_at_s - report.arrived_at_s
        same = before is None or out.token_ids == before
        return Line(name, load_s, first_s, len(ids), report.num_disk_tokens, same), out.token_ids


class Rates(NamedTuple):
    """GB/s of rows that come back into a cache, and of the same files read by one thread; medians.

    new: into memory that was never touched, page faults included, as behind a restart; else into memory that is there.
    part: of rows over files, the median of the ratios of measurements that came one behind the other.
    """

    restored_new: float
    read_new: float
    part_new: float
    restored: float
    read: float
    part: float


def rates(target: str, options: dict[str, Any], folder: Path, num_tokens: int, repeats: int) -> Rates:
    """Measure both in turns, into new memory once for each of the repeats. The files are in the page cache."""
    new, again = list[tuple[float, float]](), list[tuple[float, float]]()
    files = [os.open(path, os.O_RDONLY) for path in folder.rglob(f"*{ROWS}")]
    for _ in range(repeats):
        with LLM(target, **options) as llm:
            ids, cache = prompt(llm, num_tokens), cast(BlockCache, llm.engine.runner.cache)
            keeper = cache.keeper
            assert keeper is not None
            began = time.perf_counter()
            fetch = cache.fetch(fetch_slot(0), ids)
            assert fetch is not None
            fetch.wait()
            size = sum(block.place.entry.num_bytes for block in fetch.loaded) / 1e9
            restored = size / (time.perf_counter() - began)
            began = time.perf_counter()
            buffers = [bytearray(os.fstat(file).st_size) for file in files]
            new.append((restored, _read(files, buffers, began)))
            for _ in range(IN_TURNS):
                began = time.perf_counter()
                keeper.fetch(fetch.slot, fetch.loaded).wait()  # into the same blocks once more
                restored = size / (time.perf_counter() - began)
                again.append((restored, _read(files, buffers, time.perf_counter())))
            cache.arrived(fetch)
    for file in files:
        os.close(file)
    return Rates(*_medians(new), *_medians(again))


def _read(files: Seq[int], buffers: Seq[bytearray], began: float) -> float:
    """Read files into memory, and return GB/s since `began`."""
    num_bytes = sum(os.preadv(file, [buffer], 0) for file, buffer in zip(files, buffers, strict=True))
    return num_bytes / (time.perf_counter() - began) / 1e9


def _medians(pairs: Seq[tuple[float, float]]) -> tuple[float, float, float]:
    """Of rows, of files, and of their ratios."""
    rows, files = zip(*pairs, strict=True)
    return median(rows), median(files), median(own / other for own, other in pairs)


def killed(num: int, folder: Path, model: Path, seed: int) -> dict[str, int]:
    """Kill so many processes while they write. Returns how many wrote something, wrong texts and damaged blocks."""
    chance, texts = random.Random(seed), deque[str](maxlen=300)
    options: dict[str, Any] = {"draft": "none", "max_seq_len": 256, "max_batch_size": 4}
    size, num_grown = 0, 0
    for _ in range(num):
        some = [f"{chance.randrange(10**9)} {TEXT}" for _ in range(6)]
        texts += some
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with LLM(str(model), **options, kv_disk=f"{KILLED_SIZE}:{folder}") as llm:
                    os.write(tell, b".")
                    for text in some:
                        llm.generate(text, ANSWER, raw=True)
            except Exception:
                traceback.print_exc()
            os._exit(0)
        os.close(tell)
        if chance.random() < 0.8:  # the others are killed while they begin
            os.read(ready, 1)
        time.sleep(chance.random() * 0.3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        now = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        num_grown += now != size
        size = now
    found = kept(folder, verifies=True)
    with LLM(str(model), **options) as plain, LLM(str(model), **options, kv_disk=f"{KILLED_SIZE}:{folder}") as llm:
        pairs = [(plain.generate(t, ANSWER, raw=True)[0], llm.generate(t, ANSWER, raw=True)[0]) for t in texts]
    return {
        "processes": num,
        "that wrote": num_grown,
        "blocks at the end": sum(one.num_blocks for one in found),
        "damaged": sum(one.num_damaged for one in found),
        "texts from disk": sum(ours.report.num_disk_tokens > 0 for _, ours in pairs),
        "wrong texts": sum(a.token_ids != b.token_ids for a, b in pairs),
    }


def command(
    target: Annotated[str, typer.Option(help="checkpoint")] = "shipped",
    draft: Annotated[str, typer.Option(help="draft model, or a drafter without one")] = "none",
    spec_length: Annotated[
        int | None,
        typer.Option(help="a fixed length, for which a draft model reads the prompt, too; none = auto", min=1),
    ] = None,
    tokens: Annotated[int, typer.Option(help="of the prompt", min=64)] = 1500,
    repeats: Annotated[int, typer.Option(help="restarts, and times that files are read", min=1)] = 3,
    kills: Annotated[int, typer.Option(help="processes to kill while they write", min=0)] = 0,
    model: Annotated[
        Path | None, typer.Option(help="small model for --kills; none = shipped", show_default=False)
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="on the disk in question; none = a temporary one", show_default=False)
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Read a long prompt cold and behind restarts, time how rows come back, and kill processes while they write."""
    console = make_console()
    with tempfile.TemporaryDirectory(dir=folder) as made:
        place = Path(made)
        counts = killed(kills, place / "killed", model or Path("shipped"), 1) if kills else {}
        for name, count in counts.items():
            console.print(f"{count:,} {name}")
        with LLM(target, draft="none", max_seq_len=64) as llm:
            ceiling = print_ceiling(llm.checkpoint.model, console)
        lines, options = list[Line](), options_of(draft, spec_length, tokens, place / "kv")
        cold, ids = asked(target, options, tokens, "cold", None)
        lines.append(cold)
        for number in range(repeats):
            lines.append(asked(target, options, tokens, f"restart {number + 1}", ids)[0])
        console.print(table(lines, COLUMNS))
        shelves = kept(place / "kv")
        for shelf in shelves:
            console.print(f"kept of {shelf.model}: {shelf.num_tokens:,} tokens, {shelf.num_bytes / 1e9:.3f} GB")
        ratio = cold.first_token_s / median(line.first_token_s for line in lines[1:])
        console.print(f"first token behind a restart: {ratio:.0f} times as soon as cold")
        found = rates(target, options, place / "kv", tokens, repeats)
        console.print(
            f"into new memory rows come back at {found.restored_new:.2f} GB/s, and the files are read at "
            f"{found.read_new:.2f} GB/s: {found.part_new:.2f}; into memory that is there at {found.restored:.2f} and "
            f"{found.read:.2f} GB/s: {found.part:.2f}"
        )
    about = {"bench": "kv_disk", "target": target, "draft": draft, "spec_length": spec_length, "kills": counts}
    measured = {"ceiling": asdict(ceiling), "kept_tokens": [shelf.num_tokens for shelf in shelves], **found._asdict()}
    keep({**about, **measured, "lines": [asdict(line) for line in lines]}, json_file)


if __name__ == "__main__":
    start(command)
