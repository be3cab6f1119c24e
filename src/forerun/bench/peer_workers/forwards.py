"""Runs single forward passes of another engine: `python forwards.py transformers`, or `openvino`.

It shares the loop and the loading of worker.py beside it, but after the first line every line is one pass:

    {"past", "ids"}  -> {"seconds", "best", "idle_cpu_s"}

seconds is the wall time of one pass over `ids` with the logits of all of them, behind a cache that holds `past` and is
filled before the clock starts. best are the ids of the largest logits. Only the target is loaded.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from forerun.bench.peer_workers import worker
else:
    import worker  # the folder of the script that runs is searched first


class Forwarding(worker.Loaded, Protocol):
    """An engine that runs single passes."""

    def forward(self, past: list[int], ids: list[int]) -> tuple[float, list[int]]: ...


class TransformersForward:
    """Passes by one call of transformers' model each, over a DynamicCache."""

    def __init__(self, question: worker.Json) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._transformers: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(question["num_threads"])
        self._model = worker.load_causal(question["target"])
        self._cache: Any = None
        self._held: list[int] = []
        self.settings: worker.Settings = {}
        self.about = (
            f"transformers {self._transformers.__version__} with torch {self._torch.__version__}: bfloat16, "
            f"{self._model.config._attn_implementation} attention, DynamicCache"
        )

    def forward(self, past: list[int], ids: list[int]) -> tuple[float, list[int]]:
        """Return the seconds of the call, and the argmax of each token's logits."""
        with self._torch.inference_mode():
            self._hold(past)
            rows, start = self._torch.tensor([ids]), time.perf_counter()
            logits = self._model(rows, past_key_values=self._cache, use_cache=True).logits
            seconds = time.perf_counter() - start
        self._held = past + ids
        check_rows(logits.shape, len(ids))
        return seconds, logits[0].argmax(-1).tolist()

    def _hold(self, past: list[int]) -> None:
        """Make the cache hold exactly these tokens, at least one."""
        if self._held[: len(past)] == past:
            if surplus := len(self._held) - len(past):
                self._cache.crop(-surplus)
        else:
            self._cache = self._transformers.DynamicCache(config=self._model.config)
            self._model(self._torch.tensor([past]), past_key_values=self._cache, use_cache=True, logits_to_keep=1)


class OpenvinoForward:
    """Passes by one inference of openvino's runtime each; the converted model keeps keys and values as its state."""

    def __init__(self, question: worker.Json) -> None:
        openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        target = worker.converted(question["target"], Path(question["work"]) / "openvino-target")
        compiled = openvino.Core().compile_model(target / worker.MODEL, "CPU", worker.properties(question))
        self._request: Any = compiled.create_infer_request()
        self._held: list[int] = []
        self.settings: worker.Settings = {}
        types = {
            name: compiled.get_property(name).get_type_name()  # the type that openvino really uses
            for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
        }
        self.about = (
            f"openvino {importlib.metadata.version('openvino')} without genai: "
            f"{', '.join(f'{name} {value}' for name, value in types.items())}, weights stored as "
            f"{worker.weights_type(target)} (optimum-intel, no compression), stateful attention"
        )

    def forward(self, past: list[int], ids: list[int]) -> tuple[float, list[int]]:
        """Return the seconds of the inference, and the argmax of each token's logits.

        The state is always filled anew: to cut it back would write it to new memory, which the next inference moves.
        """
        if self._held != past:
            self._request.reset_state()
            self._infer([], past)
        seconds, logits = self._infer(past, ids)
        self._held = past + ids
        check_rows(logits.shape, len(ids))
        return seconds, logits[0].argmax(-1).tolist()

    def _infer(self, past: list[int], ids: list[int]) -> tuple[float, Any]:
        np, num_all = self._numpy, len(past) + len(ids)
        inputs = {
            "input_ids": np.array([ids], dtype=np.int64),
            "attention_mask": np.ones((1, num_all), dtype=np.int64),
            "position_ids": np.arange(len(past), num_all, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        start = time.perf_counter()
        found = self._request.infer(inputs, share_inputs=True, share_outputs=True)  # shares logits instead of a copy
        return time.perf_counter() - start, found["logits"]


def check_rows(shape: Any, num_rows: int) -> None:
    """Raise where an engine left out the logits of some tokens, because it would then look too fast."""
    if tuple(shape)[:2] != (1, num_rows):
        raise RuntimeError(f"its logits are of shape {tuple(shape)}, and {num_rows} rows of one sequence were wanted")


FORWARDS: dict[str, Callable[[worker.Json], Forwarding]] = {
    "transformers": TransformersForward,
    "openvino": OpenvinoForward,
}


def answer(peer: Forwarding, question: worker.Json) -> worker.Json:
    """Run one pass. The peer itself measures the time, because it has to fill a cache first."""
    seconds, best = peer.forward(question["past"], question["ids"])
    return {"seconds": seconds, "best": best}


if __name__ == "__main__":
    worker.main(FORWARDS[sys.argv[1]], answer)
