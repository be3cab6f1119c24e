"""The program of test_fork.py: a parent computes and forks, and its children must compute the same.

python -m ops.forking idle | busy | llm. Exit code 0 = every child computed the same bits as the parent and ended
without an error; a child that hangs is killed.
"""

import gc
import multiprocessing
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun import LLM, SamplingParams, native
from forerun.ops.torch import TorchModel
from ops.native_cases import BFLOAT16, Session, make_config, random_weights, same_bits, tokens_of
from tensors import TensorOps, load_model

HANGS_S = 30.0


def make_model() -> TorchModel:
    """A decoder that is large enough for two threads."""
    config = make_config(vocab_size=700, hidden_size=512, num_heads=8, head_dim=64, ffn_size=1024)
    return load_model(config, random_weights(config, BFLOAT16), TensorOps(num_threads=2))


def one_pass(model: TorchModel) -> tuple[Tensor, Any]:
    """Hidden states and logits of ten rows, and probabilities that fill a pooled row."""
    found = Session(model, max_seq_len=64).run({0: tokens_of(10, 3, 700)})
    row = found[-1, -700:].numpy().copy()
    probs = native.extension().Sampler(native.processor_isas()[0]).probs(row, 1.0, 0, -np.inf, 1.0, 0)[1]
    return found, probs.copy()


def compute(model: list[TorchModel], expected: tuple[Tensor, Any], num_passes: int) -> None:
    """Compute in a child. Between two passes its threads have time to fall asleep."""
    for _ in range(num_passes):
        found, probs = one_pass(model[0])
        assert same_bits(found, expected[0])
        assert probs.tobytes() == expected[1].tobytes()
        time.sleep(0.003)


def drop(model: list[TorchModel]) -> None:
    """Drop the model in a child, whether or not the child computed."""
    died = weakref.ref(model[0].ops)
    model.clear()
    gc.collect()
    assert died() is None


def compute_and_drop(model: list[TorchModel], expected: tuple[Tensor, Any], num_passes: int) -> None:
    """Make, run and drop a model in a child."""
    compute(model, expected, num_passes)
    drop(model)


def fork(target: Callable[..., None], *arguments: Any) -> None:
    child = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    child.start()
    child.join(HANGS_S)
    if child.is_alive():
        child.kill()
        child.join()
        sys.exit("a forked child hung")
    if child.exitcode != 0:
        sys.exit(f"a forked child ended with {child.exitcode}")


def idle() -> None:
    """Fork while the threads sleep, and fork a child of a child."""
    model = [make_model()]
    expected = one_pass(model[0])
    time.sleep(0.1)
    fork(drop, model)
    fork(compute_and_drop, model, expected, 20)
    fork(forks_again, model, expected)
    assert same_bits(one_pass(model[0])[0], expected[0])


def forks_again(model: list[TorchModel], expected: tuple[Tensor, Any]) -> None:
    """In a child."""
    one_pass(model[0])
    fork(compute_and_drop, model, expected, 3)


def busy() -> None:
    """Fork while another thread runs passes, so that it holds each lock at some moment."""
    model = [make_model()]
    expected, ends = one_pass(model[0]), threading.Event()

    def work() -> None:
        while not ends.is_set():
            model[0].logits(torch.ones(400, 512))
            one_pass(model[0])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(8):
            time.sleep(0.011)
            fork(compute, model, expected, 3)
    finally:
        ends.set()
        thread.join()


def llm() -> None:
    """Fork with an LLM of the shipped pair."""
    engine, params = LLM("shipped"), SamplingParams(max_tokens=12, temperature=0)
    text = engine.generate("def fib(n):", params)[0].text
    time.sleep(0.1)

    def child() -> None:
        assert engine.generate("def fib(n):", params)[0].text == text

    fork(child)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"idle": idle, "busy": busy, "llm": llm}[sys.argv[1]]()
