"""Blocks on disk: another process finds what one wrote, bit for bit, and nothing that is damaged or not its own."""

import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.load import wait_for
from forerun import LLM, BadOption, SamplingParams
from forerun.blocks import CacheShape
from forerun.kv import disk
from forerun.kv.cache import BlockCache
from forerun.kv.disk import SECRET, Folder, Limit, Shelf
from forerun.kv.keeping import Keeper
from forerun.kv.segments import ENTRIES, ENTRY_BYTES, ROWS, remove
from forerun.models.runner import Run, pack
from refusals import refusal
from tiny import write_tiny

Models = dict[str, str]  # folders by name
TEXT = "what was read once is never read again, neither in this process nor in the one that comes behind it"
PARAMS = SamplingParams(temperature=0, max_tokens=12)
SHAPES = {
    "all rows": CacheShape(num_layers=3, num_kv_heads=2, head_dim=4),
    "windows": CacheShape(num_layers=4, num_kv_heads=2, head_dim=4, windows=(None, 20, 20, None)),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Random models: one like Llama, one that resembles it, one of another kind, and one with windows."""
    folder = tmp_path_factory.mktemp("disk")
    made = {
        "llama": write_tiny(folder / "llama", inner_scale=0.05),
        "draft": write_tiny(folder / "draft", inner_scale=0.04),
        "other": write_tiny(folder / "other", seed=1),
        "gemma3_text": write_tiny(folder / "gemma", "gemma3_text"),
    }
    return {name: str(path) for name, path in made.items()}


def asked(target: str, kv_disk: Path | None, text: str = TEXT, **options: Any) -> tuple[list[int], int]:
    """Start an engine, ask it once, and close it. Returns the answer, and how many tokens came from disk."""
    params = options.pop("params", PARAMS)
    given = {} if kv_disk is None else {"kv_disk": f"1GB:{kv_disk}"}
    with LLM(target, **{"draft": "none", "max_seq_len": 256, **options}, **given) as llm:
        (out,) = llm.generate(text, params, raw=True)
        llm.engine.runner.cache.check_integrity()
        return out.token_ids, out.report.num_disk_tokens


def files(folder: Path, ending: str) -> list[Path]:
    return sorted(folder.glob(f"*/*{ending}"))


# ------------------------------------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize("model", ["llama", "gemma3_text"])
@pytest.mark.parametrize("options", [{}, {"ops": "reference"}, {"dtype": "bfloat16"}, {"draft": "lookup"}])
def test_another_engine_finds_what_one_wrote(tiny: Models, tmp_path: Path, model: str, options: dict[str, Any]) -> None:
    plain, _ = asked(tiny[model], None, **options)
    first, found = asked(tiny[model], tmp_path / "kv", **options)
    assert (first, found) == (plain, 0)
    again, found = asked(tiny[model], tmp_path / "kv", **options)
    assert (again, found) == (plain, len(TEXT) // 16 * 16)
    longer, found = asked(tiny[model], tmp_path / "kv", TEXT + " and more", **options)
    assert longer == asked(tiny[model], None, TEXT + " and more", **options)[0]
    assert found == len(TEXT) // 16 * 16


def test_a_draft_model_has_its_rows_from_disk_too(tiny: Models, tmp_path: Path) -> None:
    options = {"draft": tiny["draft"], "params": SamplingParams(temperature=0.7, seed=1, max_tokens=40)}
    plain, _ = asked(tiny["llama"], None, **options)
    assert asked(tiny["llama"], tmp_path / "kv", **options) == (plain, 0)
    assert len(list((tmp_path / "kv").glob("*/"))) == 2
    hits = list[int]()
    with LLM(tiny["llama"], draft=tiny["draft"], max_seq_len=256, kv_disk=f"1GB:{tmp_path / 'kv'}") as llm:
        (out,) = llm.generate(TEXT, options["params"], raw=True)
        hits += [runner.cache.prefix_hit_tokens for runner in llm.engine.drafter.members[out.report.draft].runners]  # type: ignore[attr-defined]
    assert out.token_ids == plain
    assert hits == [len(TEXT) // 16 * 16]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("is_native", [True, False])
def test_rows_come_back_bit_for_bit(tmp_path: Path, shape: CacheShape, is_native: bool) -> None:
    """200 tokens of random rows in one cache, and read in another, whose memory held other numbers."""
    tokens = [random.Random(7).randrange(1000) for _ in range(200)]
    folder = Folder(tmp_path / "kv", 1 << 30)

    def cache(mark: float) -> BlockCache:
        made = BlockCache.create(shape, "paged", max_batch_size=2, max_seq_len=256)
        for pool in made.pools.tensors():
            pool.values.fill(mark)
        if not is_native:
            made.pools._moved = [None] * len(made.kinds)
        sizes = [made.pools.record_bytes(kind) for kind in range(len(made.kinds))]
        made.keep_on_disk(Keeper(made.pools, folder.shelf(["x"], sizes)))
        return made

    first = cache(1.0)
    first.open(0)
    for start in range(0, 200, 40):
        first.reserve(0, 40)
        for kind in range(len(first.kinds)):
            view = first.view(pack([Run(0, tokens[start : start + 40])], first), kind)
            for layer, pool in enumerate(first.pools):
                if shape.kind_of(layer) == kind:
                    shape_of_rows = (40, *pool.keys.shape[1:])
                    shaped = np.random.default_rng(layer + start).standard_normal(shape_of_rows, np.float32)
                    pool.write(view.write_rows, shaped, -shaped)
        first.keep({0: range(40)})
        first.publish(0, tokens[: start + 40])
    folder.close()
    folder = Folder(tmp_path / "kv", 1 << 30)
    second = cache(2.0)
    fetch = second.fetch(-2, tokens)
    second.check_integrity()
    fetch.wait()
    second.arrived(fetch)
    second.check_integrity()
    assert second.open(0, tokens) == 192
    for layer, (ours, theirs) in enumerate(zip(second.pools, first.pools, strict=True)):
        window = shape.windows[layer] if shape.windows else None
        seen = range(0 if window is None else 192 - window, 192)
        kind = shape.kind_of(layer)
        rows = [own.rows(0, seen.start, seen.stop, kind) for own in (second, first)]
        assert np.array_equal(ours.keys.values[rows[0]], theirs.keys.values[rows[1]])
        assert np.array_equal(ours.values.values[rows[0]], theirs.values.values[rows[1]])
    assert second.fetch(-2, tokens) is None, "all of it is in memory"
    folder.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path / "kv", 1 << 30)
    yield folder
    folder.close()


@pytest.fixture
def shelf(folder: Folder) -> Shelf:
    """A shelf that holds one block, of a chain."""
    shelf = folder.shelf(["x"], [64])
    shelf.write(0, b"chain", range(16), memoryview(bytearray(64)))
    return shelf


@pytest.fixture
def may_read(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What the disk waits for before it answers."""
    may_read, reads = threading.Event(), Shelf.read

    def read(self: Shelf, *given: Any) -> bool:
        return may_read.wait() and reads(self, *given)

    monkeypatch.setattr(Shelf, "read", read)
    return may_read


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[BlockCache]:
    """A small cache beside a folder into which another one has written the tokens 0 to 63."""
    folder = Folder(tmp_path / "kv", 1 << 30)
    written(small_cache(folder), list(range(64)))
    folder.close()
    folder = Folder(tmp_path / "kv", 1 << 30)
    yield small_cache(folder)
    folder.close()


def small_cache(folder: Folder) -> BlockCache:
    """A cache of four blocks beside a shelf."""
    made = BlockCache.create(SHAPES["all rows"], "paged", max_batch_size=1, max_seq_len=64)
    made.keep_on_disk(Keeper(made.pools, folder.shelf(["x"], [made.pools.record_bytes(0)])))
    return made


def written(cache: BlockCache, tokens: list[int]) -> None:
    """Run and publish 64 tokens, each row of which holds its token, and end."""
    cache.open(0, tokens)
    cache.reserve(0, 64)
    rows = cache.view(pack([Run(0, tokens)], cache)).write_rows
    for pool in cache.pools.tensors():
        pool.values[rows] = np.array(tokens, np.float32)[:, None, None]
    cache.keep({0: range(64)})
    cache.publish(0, tokens)
    cache.release(0)


def test_a_fetch_takes_no_more_blocks_than_are_free(filled: BlockCache) -> None:
    cache, tokens = filled, list(range(64))
    cache.open(7)
    cache.reserve(7, 40)
    fetch = cache.fetch(-2, tokens)
    cache.check_integrity()
    assert cache.fetch(-4, tokens) is None, "its block is on its way, and there is no other"
    fetch.wait()
    assert cache.arrived(fetch) == 16
    cache.check_integrity()
    assert cache.open(0, tokens) == 16


def test_blocks_of_a_fetch_that_was_given_up_are_free_at_once(filled: BlockCache, may_read: threading.Event) -> None:
    """The disk has not answered yet: what it says later is written to no block, which another sequence may have."""
    cache = filled
    fetch = cache.fetch(-2, list(range(64)))
    assert cache.free_tokens() == 16
    fetch.give_up()
    assert cache.arrived(fetch) == 0
    assert cache.free_tokens() == 64
    written(cache, others := list(range(100, 164)))
    may_read.set()
    fetch.wait()
    assert cache.open(0, others) == 48
    rows = cache.rows(0, 0, 48)
    assert all(pool[rows, 0, 0].float32().astype(int).tolist() == others[:48] for pool in cache.pools.tensors())


def test_what_another_process_removed_is_not_there(folder: Folder, shelf: Shelf) -> None:
    for path, _, _ in folder.segments():
        remove(path)
    shelf._looked_at = 0
    shelf.refresh()
    assert not there(shelf, b"chain")
    shelf.write(0, b"chain", range(16), memoryview(bytearray(64)))
    assert len(folder.segments()) == 1, "it is written again, where others find it"


def test_a_block_that_is_evicted_before_it_was_written_is_written(folder: Folder) -> None:
    """The thread that writes comes late: other sequences have taken the blocks."""
    first = small_cache(folder)
    late = folder._jobs.pop()
    written(first, list(range(64)))
    written(first, list(range(100, 164)))
    while late():
        pass
    second = small_cache(folder)
    for start in (0, 100):
        tokens = list(range(start, start + 64))
        fetch = second.fetch(-2, tokens)
        fetch.wait()
        assert second.arrived(fetch) == second.open(start, tokens) == 48
        rows = second.rows(start, 0, 48)
        assert all(pool.values[rows, 0, 0].astype(int).tolist() == tokens[:48] for pool in second.pools.tensors())
        second.release(start)


@pytest.mark.parametrize(
    "change", [{"target": "other"}, {"dtype": "float32"}, {"ops": "reference"}, {"quantization": "int8:group=16"}]
)
def test_rows_of_other_weights_or_numbers_are_not_taken(tiny: Models, tmp_path: Path, change: dict[str, Any]) -> None:
    asked(tiny["llama"], tmp_path / "kv")
    options = {name: value for name, value in change.items() if name != "target"}
    assert asked(tiny[change.get("target", "llama")], tmp_path / "kv", **options)[1] == 0


def test_a_salt_keeps_rows_apart(tiny: Models, tmp_path: Path) -> None:
    salted = SamplingParams(temperature=0, max_tokens=2, cache_salt="a")
    asked(tiny["llama"], tmp_path / "kv", params=salted)
    assert asked(tiny["llama"], tmp_path / "kv")[1] == 0
    assert asked(tiny["llama"], tmp_path / "kv", params=SamplingParams(max_tokens=2, cache_salt="b"))[1] == 0
    assert asked(tiny["llama"], tmp_path / "kv", params=salted)[1] > 0


def test_what_memory_loses_comes_from_disk(tiny: Models, tmp_path: Path) -> None:
    """A cache for one text: each request pushes the other's blocks out, and takes its own from disk."""
    options: dict[str, Any] = {"draft": "none", "max_seq_len": 128, "max_batch_size": 1}
    texts = [TEXT, TEXT[::-1]]
    with LLM(tiny["llama"], **options) as llm:
        plain = [llm.generate(text, PARAMS, raw=True)[0].token_ids for text in texts]
    with LLM(tiny["llama"], **options, kv_disk=f"1GB:{tmp_path / 'kv'}") as llm:
        shelf, num_blocks = llm.engine.runner.cache.keeper.shelf, 0
        for turn in range(3):
            for text, ids in zip(texts, plain, strict=True):
                (out,) = llm.generate(text, PARAMS, raw=True)
                assert out.token_ids == ids
                num_blocks += (turn == 0) * (len(out.prompt_ids) // disk.BLOCK_TOKENS)
                while len(shelf) < num_blocks:
                    time.sleep(0.001)  # until its thread has written them
                if turn > 0:
                    assert 0 < out.report.num_disk_tokens <= out.report.num_cached_tokens
        llm.engine.runner.cache.check_integrity()


def test_other_requests_go_on_while_rows_are_read(tiny: Models, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    asked(tiny["llama"], tmp_path / "kv")
    may_read = request.getfixturevalue("may_read")
    with LLM(tiny["llama"], draft="none", max_seq_len=256, kv_disk=f"1GB:{tmp_path / 'kv'}") as llm:
        other = llm.submit(["x"], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True), raw=True)[0]
        late = llm.submit([TEXT], PARAMS, raw=True)[0]
        wait_for(lambda: other.seq.finish_reason is not None)
        assert other.seq.num_output_tokens == 200
        assert late.report.num_steps == 0
        may_read.set()
        wait_for(lambda: late.seq.finish_reason is not None)
    assert late.report.num_disk_tokens > 0
    assert late.seq.output_ids == asked(tiny["llama"], None)[0]


# ---------------------------------------------------------------------------------------------------------- what breaks


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("ending", "harm", "num_found"),
    [
        pytest.param(ENTRIES, lambda data: b"", 0, id="no entry"),
        pytest.param(ROWS, lambda data: data[:100], 0, id="few rows"),
        pytest.param(ROWS, lambda data: None, 0, id="no file of rows"),
        pytest.param(ROWS, lambda data: flipped(data, 50), 0, id="a wrong row"),
        pytest.param(ENTRIES, lambda data: flipped(data, ENTRY_BYTES + 40), 16, id="a wrong entry"),
        pytest.param(ENTRIES, lambda data: data[: ENTRY_BYTES + 70], 16, id="half an entry"),
        pytest.param("", None, len(TEXT) // 16 * 16, id="rubbish beside it"),
    ],
)
def test_what_is_damaged_is_read_again(
    tiny: Models, tmp_path: Path, ending: str, harm: Callable[[bytes], bytes | None] | None, num_found: int
) -> None:
    plain, _ = asked(tiny["llama"], tmp_path / "kv")
    if harm is None:
        (path,) = files(tmp_path / "kv", ENTRIES)
        path.with_name("rubbish.idx").write_bytes(random.Random(3).randbytes(1000))
        path.with_name("rubbish.kv").write_bytes(b"")
    else:
        (path,) = files(tmp_path / "kv", ending)
        left = harm(path.read_bytes())
        path.unlink()
        if left is not None:
            path.write_bytes(left)
    assert asked(tiny["llama"], tmp_path / "kv") == (plain, num_found)
    assert asked(tiny["llama"], tmp_path / "kv") == (plain, len(TEXT) // 16 * 16), "written again"


def test_rows_that_are_damaged_under_a_running_engine(
    tiny: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = asked(tiny["llama"], tmp_path / "kv")
    with LLM(tiny["llama"], draft="none", max_seq_len=256, kv_disk=f"1GB:{tmp_path / 'kv'}") as llm:
        (path,) = files(tmp_path / "kv", ROWS)
        path.write_bytes(flipped(path.read_bytes(), 50)[:700])
        with caplog.at_level(logging.WARNING):
            (out,) = llm.generate(TEXT, PARAMS, raw=True)
        llm.engine.runner.cache.check_integrity()
    assert (out.token_ids, out.report.num_cached_tokens) == (plain, 0)
    assert len([record for record in caplog.records if "damaged" in record.message]) == 1


WRITE = """
import resource, sys
from forerun import LLM, SamplingParams
if (limit := int(sys.argv[3])):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
with LLM(sys.argv[1], draft="none", max_seq_len=256, kv_disk=f"1GB:{sys.argv[2]}") as llm:
    print("ready", flush=True)
    for line in sys.stdin:
        (out,) = llm.generate(line.strip(), SamplingParams(temperature=0, max_tokens=12), raw=True)
        print(out.report.num_disk_tokens, *out.token_ids, flush=True)
"""


def started(target: str, folder: Path, limit: int = 0) -> subprocess.Popen[str]:
    """A process that answers each line of its input by tokens from disk and the answer's ids."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", WRITE, target, str(folder), str(limit)]
    made = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert made.stdout.readline() == "ready\n", made.stderr.read() if made.stderr else ""
    return made


def test_a_full_disk_is_said_once(tiny: Models, tmp_path: Path) -> None:
    plain, _ = asked(tiny["llama"], None)
    process = started(tiny["llama"], tmp_path / "kv", limit=6000)
    output, log = process.communicate(f"{TEXT}\n" * 3)
    assert process.returncode == 0, log
    assert [[int(i) for i in line.split()][1:] for line in output.splitlines()] == [plain] * 3
    assert len(re.findall("nothing more is written there", log)) == 1
    ids, found = asked(tiny["llama"], tmp_path / "kv")
    assert ids == plain
    assert 0 < found < len(TEXT) // 16 * 16


@pytest.mark.skipif(os.geteuid() == 0 and not hasattr(os, "seteuid"), reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_read(tiny: Models, tmp_path: Path) -> None:
    plain, _ = asked(tiny["llama"], tmp_path / "kv")
    for path in [*(tmp_path / "kv").rglob("*"), tmp_path / "kv"]:
        os.chmod(path, 0o500 if path.is_dir() else 0o400)
    folder = Folder(tmp_path / "kv", 1 << 30)
    folder.failed(OSError(30, "Read-only file system"))
    folder.close()
    assert asked(tiny["llama"], tmp_path / "kv") == (plain, len(TEXT) // 16 * 16)


def test_processes_that_are_killed_leave_nothing_wrong(tiny: Models, tmp_path: Path) -> None:
    """benchmarks.kv_disk does it a thousand times."""
    chance = random.Random(11)
    for turn in range(6):
        process = started(tiny["llama"], tmp_path / "kv")
        process.stdin.write(f"{TEXT} {turn}\n" * 3)
        process.stdin.flush()
        time.sleep(chance.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    for turn in range(6):
        text = f"{TEXT} {turn}"
        assert asked(tiny["llama"], tmp_path / "kv", text)[0] == asked(tiny["llama"], None, text)[0]


def test_two_processes_share_a_folder(tiny: Models, tmp_path: Path) -> None:
    texts = [f"{number} {TEXT}" for number in range(8)]
    plain = {text: asked(tiny["llama"], None, text)[0] for text in texts}
    both = [started(tiny["llama"], tmp_path / "kv") for _ in range(2)]
    found = 0
    for turn in range(3):
        for number, text in enumerate(texts):
            own = both[(number + turn) % 2]
            own.stdin.write(text + "\n")
            own.stdin.flush()
            num, *ids = map(int, own.stdout.readline().split())
            assert ids == plain[text]
            found += num
        while not turn and len(files(tmp_path / "kv", ENTRIES)) < 2:
            time.sleep(0.01)  # until both have written
        time.sleep(2 * disk.REFRESH_S)  # so that each looks again
    assert found > 0, "one read what the other had written"
    for process in both:
        process.communicate()
        assert process.returncode == 0


# -------------------------------------------------------------------------------------------------------- size, secrets


def there(shelf: Shelf, chain: bytes) -> bool:
    return shelf.find(0, chain, range(16)) is not None


def test_the_folder_keeps_to_its_size_and_loses_what_was_used_longest_ago(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "kv", disk.LEAST_BYTES)
    shelf, rows = folder.shelf(["x"], [1 << 20]), memoryview(bytearray(1 << 20))
    first = b"first"
    others = [str(number).encode() for number in range(150)]
    shelf.write(0, first, range(16), rows)
    for number, chain in enumerate(others):
        time.sleep(0.002)
        shelf.write(0, chain, range(16), rows)
        if number % 5 == 0:
            shelf.use(0, first)
        assert sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*")) <= disk.LEAST_BYTES + (1 << 20)
    folder.close()
    shelf = Folder(tmp_path / "kv", disk.LEAST_BYTES).shelf(["x"], [1 << 20])
    assert there(shelf, first), "it was used all the time"
    assert there(shelf, others[-1])
    assert not there(shelf, others[20])


@pytest.mark.parametrize("ahead_s", [400 * 86_400, -20_000 * 86_400, 0])
def test_what_a_wrong_clock_left_does_not_stay_for_ever(tmp_path: Path, ahead_s: float) -> None:
    """A folder that is full of files from the future goes on: they go, and what is written now stays."""
    folder = Folder(tmp_path / "kv", disk.LEAST_BYTES)
    shelf, rows = folder.shelf(["x"], [1 << 20]), memoryview(bytearray(1 << 20))
    for number in range(80):
        shelf.write(0, b"old %d" % number, range(16), rows)
    for file in files(tmp_path / "kv", ROWS):
        os.utime(file, (time.time() + ahead_s,) * 2)
    for number in range(40):
        shelf.write(0, b"new %d" % number, range(16), rows)
    folder.close()
    again = Folder(tmp_path / "kv", disk.LEAST_BYTES)
    shelf = again.shelf(["x"], [1 << 20])
    assert sum(there(shelf, b"new %d" % number) for number in range(40)) >= 30
    again.close()


def test_tokens_are_compared(shelf: Shelf) -> None:
    assert shelf.find(0, b"chain", range(16)) is not None
    assert shelf.find(0, b"chain", range(1, 17)) is None


def test_nobody_else_can_read_the_folder(tmp_path: Path, folder: Folder, shelf: Shelf) -> None:
    folder.close()
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    assert SECRET in [path.name for path in (tmp_path / "kv").rglob("*")]
    other = Folder(tmp_path / "other", 1 << 30)
    assert other.shelf(["x"], [64]).path.name != shelf.path.name, "the names tell nothing without the secret"
    assert other.shelf(["x"], [64]).key(b"chain") != shelf.key(b"chain")
    other.close()


def test_a_process_may_be_killed_while_it_makes_the_folder(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "kv" / ".0123456789abcdef").touch()
    Folder(tmp_path / "kv", 1 << 30).close()


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    for mode in (0o755, 0o750, 0o705, 0o710):
        (tmp_path / f"{mode:o}").mkdir()
        (tmp_path / f"{mode:o}").chmod(mode)  # whatever the umask is
        assert "others can read" in refusal(BadOption, Folder, tmp_path / f"{mode:o}", 1 << 30)
    (tmp_path / "used").mkdir(mode=0o700)
    (tmp_path / "used" / "thesis.tex").touch()
    assert "holds other files" in refusal(BadOption, Folder, tmp_path / "used", 1 << 30)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv_disk": "much"}, "write 20GB"),
        ({"kv_disk": "1KB"}, "too small"),
        ({"kv_disk": "1GB", "prefix_caching": False}, "needs kv_cache_backend='paged' and prefix_caching"),
        ({"kv_disk": "1GB", "kv_cache_backend": "contiguous"}, "needs kv_cache_backend='paged' and prefix_caching"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_the_door(tiny: Models, options: dict[str, Any], why: str) -> None:
    assert why in refusal(BadOption, LLM, tiny["llama"], **options)


def test_sizes_and_folders() -> None:
    assert Limit.parse("20GB:~/x") == (20 * 10**9, Path("~/x").expanduser())
    assert Limit.parse("1.5GiB") == (3 << 29, disk.default_path())
