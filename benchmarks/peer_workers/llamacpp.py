"""A GGUF file in llama.cpp: its C library as llama-cpp-python binds it, without samplers or anything else above it.

worker.py continues prompts with it, forwards.py runs single passes.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

BATCH_TOKENS = 512  # of one call at most; prompts run in pieces of this


class Llama:
    """A loaded file with some places for texts, each with a KV cache of its own in float16, which is its default.

    about: version, the file's type, and the instructions that the library uses. keeps_state: some of its layers do, so
    that a place cannot be cut back, but for what `copied` has of it.
    """

    def __init__(self, question: dict[str, Any]) -> None:
        self._lib: Any = importlib.import_module("llama_cpp")
        self._numpy: Any = importlib.import_module("numpy")
        lib, path = self._lib, question["target"]
        lib.llama_backend_init()
        of_model = lib.llama_model_default_params()
        of_model.use_mmap = False  # the system may drop pages of the file while other engines run
        of_model.n_gpu_layers = 0
        model = lib.llama_model_load_from_file(path.encode(), of_model)
        if model is None:
            raise RuntimeError(f"llama.cpp could not load {path}")
        of_context = lib.llama_context_default_params()
        of_context.n_seq_max = question["num_places"]
        of_context.n_ctx = question["num_places"] * (-(-question["num_positions"] // 256) * 256)
        of_context.n_batch = of_context.n_ubatch = BATCH_TOKENS
        of_context.n_threads = of_context.n_threads_batch = question["num_threads"]
        self.keeps_state = lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)
        self._context = lib.llama_init_from_model(model, of_context)
        if self._context is None:
            raise RuntimeError(f"llama.cpp could not make a context of {of_context.n_ctx} tokens for {path}")
        self._num_ids = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)
        name = ctypes.create_string_buffer(128)
        lib.llama_model_desc(model, name, len(name))
        self.about = (
            f"llama.cpp of llama-cpp-python {lib.__version__}: {name.value.decode()}, KV cache in float16, "
            f"{lib.llama_print_system_info().decode().strip()}"
        )

    def cut(self, place: int, num_tokens: int) -> None:
        """Forget what a place holds behind its first tokens."""
        if not self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), place, num_tokens, -1):
            raise RuntimeError(f"llama.cpp could not cut its cache back to {num_tokens} tokens")

    def copied(self, place: int) -> Any:
        """Return a copy of all that a place holds."""
        lib, context = self._lib, self._context
        data = (ctypes.c_uint8 * lib.llama_state_seq_get_size(context, place))()
        if lib.llama_state_seq_get_data(context, data, len(data), place) != len(data):
            raise RuntimeError("llama.cpp could not copy its cache")
        return data

    def put_back(self, place: int, data: Any) -> None:
        """Make a place hold what it held when it was copied."""
        self.cut(place, 0)
        if self._lib.llama_state_seq_set_data(self._context, data, len(data), place) != len(data):
            raise RuntimeError("llama.cpp could not put back a copy of its cache")

    def fill(self, place: int, ids: list[int], start: int) -> None:
        """Run tokens from position `start` on without logits."""
        for first in range(0, len(ids), BATCH_TOKENS):
            self._run(place, ids[first : first + BATCH_TOKENS], start + first, 0)

    def run(self, place: int, ids: list[int], start: int, num_logits: int) -> Any:
        """Run up to BATCH_TOKENS tokens, and return the logits of the last `num_logits` of them, as a view."""
        self._run(place, ids, start, num_logits)
        found = self._lib.llama_get_logits(self._context)  # it waits until they are there
        return self._numpy.ctypeslib.as_array(found, shape=(num_logits, self._num_ids))

    def _run(self, place: int, ids: list[int], start: int, num_logits: int) -> None:
        batch, num = self._batch, len(ids)
        if num > BATCH_TOKENS:
            raise RuntimeError(f"a pass of {num} tokens is longer than {BATCH_TOKENS}")
        batch.n_tokens = num
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, i >= num - num_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, place
        if code := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code} for {num} tokens behind {start}")
        self._lib.llama_synchronize(self._context)
