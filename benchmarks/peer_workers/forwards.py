"""Runs single forward passes of another engine: `python forwards.py transformers`, `openvino`, or `llama.cpp`.

It shares the loop and the loading of worker.py beside it, but after the first line every line is one pass:

    {"past", "ids", "place"}  -> {"seconds", "best", "idle_cpu_s"}

seconds is the wall time of one pass over `ids` with the logits of all of them, behind a cache that holds `past` and is
filled before the clock starts. Each place has a cache of its own. best are the ids of the largest logits. Only the
target is loaded.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from benchmarks.peer_workers import worker
    from benchmarks.peer_workers.llamacpp import Llama
else:
    import worker  # the folder of the script that runs is searched first
    from llamacpp import Llama


class Forwarding(worker.Loaded, Protocol):
    """An engine that runs single passes."""

    def forward(self, past: list[int], ids: list[int], place: int) -> tuple[float, list[int]]: ...


class TransformersForward:
    """Passes by one call of transformers' model each, over a DynamicCache for each place."""

    def __init__(self, question: worker.Json) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._transformers: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(question["num_threads"])
        self._model = worker.load_module(question["target"])
        self._caches: dict[int, Any] = {}
        self._held: dict[int, list[int]] = defaultdict(list)
        self.settings: worker.Settings = {}
        self.about = (
            f"transformers {self._transformers.__version__} with torch {self._torch.__version__}: bfloat16, "
            f"{self._model.config._attn_implementation} attention, DynamicCache"
        )

    def forward(self, past: list[int], ids: list[int], place: int) -> tuple[float, list[int]]:
        """Return the seconds of the call, and the argmax of each token's logits."""
        with self._torch.inference_mode():
            cache = self._hold(past, place)
            rows, start = self._torch.tensor([ids]), time.perf_counter()
            logits = self._model(rows, past_key_values=cache, use_cache=True).logits
            seconds = time.perf_counter() - start
        self._held[place] = past + ids
        check_rows(logits.shape, len(ids))
        return seconds, logits[0].argmax(-1).tolist()

    def _hold(self, past: list[int], place: int) -> Any:
        """Make a cache hold exactly these tokens, at least one, and return it."""
        held = self._held[place]
        if held and held[: len(past)] == past:
            if surplus := len(held) - len(past):
                self._caches[place].crop(-surplus)
        else:
            self._caches[place] = self._transformers.DynamicCache(config=self._model.config)
            self._model(
                self._torch.tensor([past]), past_key_values=self._caches[place], use_cache=True, logits_to_keep=1
            )
        return self._caches[place]


class OpenvinoForward:
    """Passes by one inference of openvino's runtime each; each place has a request, whose state has keys and values."""

    def __init__(self, question: worker.Json) -> None:
        openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        folder = Path(question["work"]) / "openvino-target"
        target = worker.converted(question["target"], folder, question["weights"])
        compiled = openvino.Core().compile_model(target / worker.MODEL, "CPU", worker.properties(question))
        self._requests = [compiled.create_infer_request() for _ in range(question["num_places"])]
        self._held: dict[int, list[int]] = defaultdict(list)
        self.settings: worker.Settings = {}
        names = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
        types = {name: compiled.get_property(name).get_type_name() for name in names}  # which openvino really uses
        self.about = (
            f"openvino {importlib.metadata.version('openvino')} without genai: "
            f"{', '.join(f'{name} {value}' for name, value in types.items())}, weights stored as "
            f"{worker.weights_type(target)} ({worker.about_weights(question['weights'])}), stateful attention"
        )

    def forward(self, past: list[int], ids: list[int], place: int) -> tuple[float, list[int]]:
        """Return the seconds of the inference, and the argmax of each token's logits.

        The state is always filled anew: to cut it back would write it to new memory, which the next inference moves.
        """
        if self._held[place] != past:
            self._requests[place].reset_state()
            self._infer([], past, place)
        seconds, logits = self._infer(past, ids, place)
        self._held[place] = past + ids
        check_rows(logits.shape, len(ids))
        return seconds, logits[0].argmax(-1).tolist()

    def _infer(self, past: list[int], ids: list[int], place: int) -> tuple[float, Any]:
        np, num_all = self._numpy, len(past) + len(ids)
        inputs = {
            "input_ids": np.array([ids], dtype=np.int64),
            "attention_mask": np.ones((1, num_all), dtype=np.int64),
            "position_ids": np.arange(len(past), num_all, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        request, start = self._requests[place], time.perf_counter()
        found = request.infer(inputs, share_inputs=True, share_outputs=True)  # shares logits instead of a copy
        return time.perf_counter() - start, found["logits"]


class LlamaForward:
    """Passes by one llama_decode each; each place is a sequence of its own.

    A cache of keys and values is cut back. Where layers keep a state, what the place held before the last pass is put
    back instead, so that the pass can run again; both happen before the clock starts.
    """

    def __init__(self, question: worker.Json) -> None:
        self._llama = Llama(question)
        self._held: dict[int, list[int]] = defaultdict(list)
        self._before: dict[int, tuple[list[int], Any]] = {}  # tokens, and the copy of what a place held with them
        self.about, self.settings = self._llama.about, worker.Settings()

    def forward(self, past: list[int], ids: list[int], place: int) -> tuple[float, list[int]]:
        """Return the seconds of the call, and the argmax of each token's logits."""
        llama = self._llama
        kept = self._hold(past, place)
        llama.fill(place, past[kept:], kept)
        if llama.keeps_state and self._before.get(place, (None,))[0] != past:
            self._before[place] = past, llama.copied(place)
        start = time.perf_counter()
        logits = llama.run(place, ids, len(past), len(ids))
        seconds = time.perf_counter() - start
        self._held[place] = past + ids
        return seconds, logits.argmax(-1).tolist()

    def _hold(self, past: list[int], place: int) -> int:
        """Make a place hold the first of these tokens, and return how many."""
        llama, held = self._llama, self._held[place]
        kept = len(past) if held[: len(past)] == past else 0
        if not llama.keeps_state or kept == 0:
            llama.cut(place, kept)
        elif len(held) > kept:
            before, copied = self._before[place]
            kept = kept if before == past else 0
            if kept:
                llama.put_back(place, copied)
            else:
                llama.cut(place, 0)
        return kept


def check_rows(shape: Any, num_rows: int) -> None:
    """Raise where an engine left out the logits of some tokens, because it would then look too fast."""
    if tuple(shape)[:2] != (1, num_rows):
        raise RuntimeError(f"its logits are of shape {tuple(shape)}, and {num_rows} rows of one sequence were wanted")


FORWARDS: dict[str, Callable[[worker.Json], Forwarding]] = {
    "transformers": TransformersForward,
    "openvino": OpenvinoForward,
    "llama.cpp": LlamaForward,
}


def answer(peer: Forwarding, question: worker.Json) -> worker.Json:
    """Run one pass. The peer itself measures the time, because it has to fill a cache first."""
    seconds, best = peer.forward(question["past"], question["ids"], question["place"])
    return {"seconds": seconds, "best": best}


if __name__ == "__main__":
    worker.main(FORWARDS[sys.argv[1]], answer)
