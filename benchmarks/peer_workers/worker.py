"""Runs another engine and answers over two pipes: `python worker.py transformers`, `openvino`, or `llama.cpp`.

It runs under the Python of the engine that is measured, so nothing of forerun is imported here, and the engine only
when it is asked for. It reads one JSON object per line and answers each with one line. The first loads the models, all
others run one prompt (forwards.py, which shares this loop, runs single passes):

    {"target" and "draft" (each a folder or a GGUF file; no draft is null), "folders" (both as folders in bfloat16),
     "work" (a folder for conversions), "num_threads", "spec_lengths", "lookup_max_n",
     "weights" (null = as "dtype" says, or as `compress` reads it), "dtype", "server" (of llama.cpp, or null),
     "num_positions" and "num_places" (the size of llama.cpp's cache)}
                                            -> {"about": a sentence, "configurations": [names]}
    {"configuration", "ids", "max_tokens"}  -> {"tokens", "seconds", "first_s", "num_first", "idle_cpu_s"}

seconds is the wall time of one generate call, first_s the part of it until the first num_first tokens came,
idle_cpu_s the processor time that this process took since its last answer. An error is answered with
{"error": a sentence, "missing": the module that is not installed, or null}. The end of the input ends the process.

All engines decode greedily and go on past the end of sequence.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from benchmarks.peer_workers.llamaserver import LlamaServerPeer
else:
    from llamaserver import LlamaServerPeer  # the folder of the script that runs is searched first

Json = dict[str, Any]
Timed = tuple[list[int], float, int]  # new ids, seconds until the first of them, how many came first
Settings = dict[str, tuple[str, int | None]]  # name -> method and tokens drafted per step (None: as the engine likes)
OWN_SCHEDULE = "draft K=auto"
MARKER = "converted_from.json"
MODEL = "openvino_model.xml"


class Loaded(Protocol):
    """A loaded engine, with the settings of its generate calls."""

    about: str
    settings: Settings


P = TypeVar("P", bound=Loaded)


class Peer(Loaded, Protocol):
    """An engine that continues prompts. ready: what has to be there before the clock runs, and goes behind the run."""

    def ready(self, method: str, spec_length: int | None) -> AbstractContextManager[None]: ...

    def generate(self, method: str, spec_length: int | None, ids: list[int], max_tokens: int) -> Timed: ...


def settings_of(question: Json, with_own_schedule: bool = False) -> Settings:
    """Return the settings of plain decoding, of lookup and of a draft model if there is one, for each length."""
    made: Settings = {"plain": ("plain", None)}
    for method in ("lookup", "draft") if question["draft"] else ("lookup",):
        made |= {f"{method} K={k}": (method, k) for k in question["spec_lengths"]}
    if question["draft"] and with_own_schedule:
        made[OWN_SCHEDULE] = ("draft", None)
    return made


class InProcess:
    """An engine that is loaded once, into this process."""

    def ready(self, method: str, spec_length: int | None) -> AbstractContextManager[None]:
        """Return nothing to wait for."""
        return nullcontext()


# ----------------------------------------------------------------------------------------------------- transformers


class FirstTokens:
    """A streamer that notes when the first tokens after the prompt came, and how many."""

    def __init__(self) -> None:
        self.num_calls, self.at, self.count = 0, 0.0, 0

    def put(self, tokens: Any) -> None:
        """Take the prompt first, then the tokens of each round."""
        self.num_calls += 1
        if self.num_calls == 2:
            self.at, self.count = time.perf_counter(), tokens.numel()

    def end(self) -> None:
        """Do nothing, because no token is held back."""


def load_module(folder: str, dtype: str = "bfloat16") -> Any:
    """Load a model, causal or an encoder-decoder, with weights in memory of their own."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    transformers.logging.set_verbosity_error()  # the last line on standard error is to be about a failure
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    for weight in model.parameters():
        weight.data = weight.data.clone()  # the system may drop pages of the file while other engines run
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    model.generation_config.forced_eos_token_id = None
    if getattr(config, "num_decoder_layers", 0) > getattr(config, "num_layers", 0):
        # transformers 5.23 makes caches of a T5 for as many layers as its encoder has.
        model.config.num_layers = config.num_decoder_layers
    return model


class TransformersPeer(InProcess):
    """`generate` of transformers: plain, assisted by the draft model, or with prompt lookup."""

    def __init__(self, question: Json) -> None:
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(question["num_threads"])
        self._max_n = question["lookup_max_n"]
        folders = question["folders"]
        self._model = load_module(folders["target"], question["dtype"])
        self._draft: Any = load_module(folders["draft"], question["dtype"]) if folders["draft"] else None
        self._has_encoder = self._model.config.is_encoder_decoder
        self.settings = settings_of(question, with_own_schedule=True)
        self.about = (
            f"transformers {transformers.__version__} with torch {self._torch.__version__}: {question['dtype']}, "
            f"{self._model.config._attn_implementation} attention{self._shared_vocabulary()}"
        )
        self._own = self._schedule() if self._draft is not None else {}

    def _shared_vocabulary(self) -> str:
        """Set both vocabulary sizes to one number, which generate compares; greedy drafts only need shared ids."""
        if self._draft is None or self._draft.config.vocab_size == self._model.config.vocab_size:
            return ""
        had, self._draft.config.vocab_size = self._draft.config.vocab_size, self._model.config.vocab_size
        return f"; the draft model's {had} ids are declared as the target's {self._model.config.vocab_size}"

    def _schedule(self, **values: Any) -> Json:
        """Read the three numbers that decide how far to draft, and set those that are given."""
        names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
        config = self._draft.generation_config
        for name, value in values.items():
            setattr(config, name, value)
        return {name: getattr(config, name, None) for name in names}

    def generate(self, method: str, spec_length: int | None, ids: list[int], max_tokens: int) -> Timed:
        """Continue one prompt. transformers' own schedule starts from its defaults, because it learns between calls."""
        more: Json = {}
        if method == "lookup":
            more = {"prompt_lookup_num_tokens": spec_length, "max_matching_ngram_size": self._max_n}
        elif method == "draft":
            fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
            self._schedule(**(self._own if spec_length is None else {"num_assistant_tokens": spec_length, **fixed}))
            more = {"assistant_model": self._draft}
        num_begun = len(ids)
        if self._has_encoder:  # a decoder's text begins with the start, and what is forced behind it counts as new
            num_begun = 1 + (self._model.generation_config.forced_bos_token_id is not None)
            max_tokens += num_begun - 1
        prompt, first, start = self._torch.tensor([ids]), FirstTokens(), time.perf_counter()
        found = self._model.generate(
            prompt,
            attention_mask=self._torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_tokens,
            streamer=first,
            **more,
        )
        return found[0, num_begun:].tolist(), first.at - start, first.count


# --------------------------------------------------------------------------------------------------------- openvino


def properties(question: Json) -> Json:
    """Return the properties with which every model is loaded into the CPU plugin."""
    threads = {"INFERENCE_NUM_THREADS": question["num_threads"]}
    if Path(question["target"]).is_file():
        # 4-bit weights of a GGUF file ran 1.4 times as fast as with bf16, which is its default on AVX-512 with BF16.
        return {"INFERENCE_PRECISION_HINT": "f32", **threads}
    return {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16", **threads}  # the cache's default: 8 bits


class OpenvinoPeer(InProcess):
    """openvino-genai's LLMPipeline with paged attention: one pipeline for each method."""

    def __init__(self, question: Json) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        self._max_n = question["lookup_max_n"]
        self.settings = settings_of(question)
        self._properties = properties(question)
        target, source = opened(question, "target")
        self._pipelines = {"plain": self._pipeline(target), "lookup": self._pipeline(target, prompt_lookup=True)}
        of_draft = ""
        if question["draft"]:
            folder, draft_source = opened(question, "draft")
            draft = self._genai.draft_model(str(folder), "CPU", **self._properties)
            self._pipelines["draft"] = self._pipeline(target, draft_model=draft)
            of_draft = f"; of the draft model {weights_type(folder)} ({draft_source})"
        self.about = (
            f"openvino-genai {importlib.metadata.version('openvino-genai')}: "
            f"{', '.join(f'{name} {value}' for name, value in self._properties.items())}, paged attention, "
            f"no prefix cache, weights stored as {weights_type(target)} ({source}){of_draft}"
        )

    def _pipeline(self, folder: Path, **more: Any) -> Any:
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # a second run of a prompt would skip most of it
        scheduler.max_num_batched_tokens = 1 << 16
        return self._genai.LLMPipeline(str(folder), "CPU", scheduler_config=scheduler, **self._properties, **more)

    def generate(self, method: str, spec_length: int | None, ids: list[int], max_tokens: int) -> Timed:
        """Continue one prompt, which is given as ids, so that no tokenizer runs."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        if spec_length is not None:
            config.num_assistant_tokens = spec_length
        if method == "lookup":
            config.max_ngram_size = self._max_n
        prompt = self._numpy.array([ids], dtype=self._numpy.int64)
        pair = [self._openvino.Tensor(rows) for rows in (prompt, self._numpy.ones_like(prompt))]
        result = self._pipelines[method].generate(self._genai.TokenizedInputs(*pair), config)
        metrics = result.perf_metrics
        return list(result.tokens[0]), metrics.get_ttft().mean / 1e3, int(metrics.raw_metrics.m_batch_sizes[0])


def weights_type(folder: Path) -> str:
    """Return the element type that most bytes of the converted model have."""
    openvino: Any = importlib.import_module("openvino")
    sizes: dict[str, int] = {}
    for op in openvino.Core().read_model(folder / MODEL).get_ops():
        if op.get_type_name() == "Constant":
            name = op.get_element_type().get_type_name()
            sizes[name] = sizes.get(name, 0) + op.get_byte_size()
    return max(sizes, key=lambda name: sizes[name])


def about_weights(weights: str | None) -> str:
    """Describe how weights were converted and compressed."""
    return f"optimum-intel, {f'nncf {weights}' if weights else 'no compression'}"


def opened(question: Json, role: str) -> tuple[Path, str]:
    """Return the folder of a model in OpenVINO's form, and in words where its weights come from.

    A GGUF file is read by openvino-genai itself. What that cannot read is converted from the same weights in bfloat16
    and compressed to 4 bits.
    """
    source = question[role]
    folder = Path(question["work"]) / f"openvino-{role}"
    weights = question["weights"] if role == "target" else None
    if Path(source).is_dir():
        return converted(source, folder, weights), about_weights(weights)
    try:
        return converted(source, folder.with_name(f"{folder.name}-file")), "as openvino-genai reads the GGUF file"
    except RuntimeError as error:
        weights = weights or "int4"
        made = converted(question["folders"][role], folder, weights)
        return made, f"{about_weights(weights)}, because of the GGUF file: {error}"


def converted(source: str, folder: Path, weights: str | None = None) -> Path:
    """Convert a checkpoint for OpenVINO once, in a process of its own, which frees its memory when it ends."""
    folder = folder if weights is None else folder.with_name(f"{folder.name}-{weights.replace(':group=', '-')}")
    path = Path(source)
    parts = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [(part.name, part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    mark = json.dumps({"source": str(path.resolve()), "files": files})
    marker = folder / MARKER
    if marker.is_file() and marker.read_text(encoding="utf-8") == mark:
        return folder
    if path.is_dir() and importlib.util.find_spec("optimum.intel") is None:
        raise ModuleNotFoundError("No module named 'optimum.intel'", name="optimum.intel")
    command = [sys.executable, __file__, "convert", source, str(folder), *filter(None, [weights])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RuntimeError(f"{'optimum-intel' if path.is_dir() else 'openvino-genai'} could not convert it: {why}")
    marker.write_text(mark, encoding="utf-8")
    return folder


def convert(source: str, folder: str, weights: str | None = None) -> None:
    """Convert a folder or a GGUF file. OpenVINO itself would store more than 1e9 weights of a folder in 8 bits."""
    if Path(source).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir(parents=True)
        link = Path(folder) / "model.gguf"  # what is made of a file is saved beside it
        link.symlink_to(source)
        importlib.import_module("openvino_genai").LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
        return
    exporter: Any = importlib.import_module("optimum.exporters.openvino.__main__")
    intel: Any = importlib.import_module("optimum.intel")
    own_type = intel.OVConfig(dtype=None)
    # A pipeline does not load without its tokenizer, used or not.
    exporter.main_export(source, folder, task="text-generation-with-past", ov_config=own_type, convert_tokenizer=True)
    if weights is not None:
        compress(Path(folder), weights)


def compress(folder: Path, weights: str) -> None:
    """Compress a converted model by nncf: "int8" has a scale per output, "int4" one per 128 weights, or :group=64.

    Under 4 bits nncf gives 8 to the embedding and the LM head.
    """
    nncf, openvino = (importlib.import_module(name) for name in ("nncf", "openvino"))
    name, _, group = weights.partition(":group=")
    modes: Any = nncf.CompressWeightsMode
    options: Json = {"mode": modes.INT8_ASYM}
    if name == "int4":
        options = {"mode": modes.INT4_ASYM, "group_size": int(group or 128), "ratio": 1.0}
    made = nncf.compress_weights(openvino.Core().read_model(folder / MODEL), **options)
    openvino.save_model(made, folder / f"new_{MODEL}", compress_to_fp16=False)
    for suffix in (".xml", ".bin"):  # not in place: the model is mapped into memory
        (folder / f"new_{MODEL}").with_suffix(suffix).replace((folder / MODEL).with_suffix(suffix))


# --------------------------------------------------------------------------------------------------------- the loop


PEERS: dict[str, Callable[[Json], Peer]] = {
    "transformers": TransformersPeer,
    "openvino": OpenvinoPeer,
    "llama.cpp": LlamaServerPeer,
}


def answer(peer: Peer, question: Json) -> Json:
    """Run one generate call, and measure its time."""
    method, spec_length = peer.settings[question["configuration"]]
    with peer.ready(method, spec_length):
        start = time.perf_counter()
        tokens, first_s, num_first = peer.generate(method, spec_length, question["ids"], question["max_tokens"])
        seconds = time.perf_counter() - start
    return {"tokens": tokens, "seconds": seconds, "first_s": first_s, "num_first": num_first}


def main(load: Callable[[Json], P], reply_of: Callable[[P, Json], Json]) -> None:
    """Answer until the input ends. Whatever the engines print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    peer: P | None = None
    cpu_s = time.process_time()
    for line in sys.stdin:
        idle_cpu_s = time.process_time() - cpu_s
        question = json.loads(line)
        reply: Json
        try:
            if peer is None:
                peer = load(question)
                reply = {"about": peer.about, "configurations": list(peer.settings)}
            else:
                reply = {**reply_of(peer, question), "idle_cpu_s": idle_cpu_s}
        except Exception as error:  # any error of an engine is reported to the benchmark
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            text = " ".join(str(error).split()) or "no reason given"
            reply = {"error": f"{type(error).__name__}: {text}", "missing": missing}
        cpu_s = time.process_time()
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:])
    else:
        main(PEERS[sys.argv[1]], answer)
