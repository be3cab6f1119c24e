"""One HTTP route that evaluates functions of forerun.theory over arrays, so that the page contains no formulas."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from fastapi import APIRouter

from forerun.engine.llm import LLM
from forerun.errors import BadOption, shown
from forerun.theory import formulas, joint, lenience, noise, roofline as roofline_of, simulate


def roofline(
    target: str, draft: str, machine: str, batch: int, context: int, max_gamma: int, overlap: float = 0.0
) -> dict[str, Any]:
    """Return c, v(gamma) for gamma = 0 .. max_gamma, and the number of rows up to which further rows cost nothing.

    All results are for bfloat16. c and v are `cost_ratio` and `verify_ratios` of forerun.theory.roofline. In a mixture
    of experts every row costs something, unless all rows choose the same experts.

    target, draft: names in forerun.theory.roofline.SHAPES. machine: a name in MACHINES there. batch: the number of
    sequences in a pass, each with `context` tokens in its cache. overlap: how far rows choose the same experts, see
    forerun.theory.roofline.Step. Raises ValueError for other names, and for steps without rows.
    """
    shapes, machines = roofline_of.SHAPES, roofline_of.MACHINES
    for what, name, known in (("target", target, shapes), ("draft", draft, shapes), ("machine", machine, machines)):
        if name not in known:
            raise ValueError(f"{what}={shown(name)} must be one of {', '.join(known)}")
    step = roofline_of.Step(batch=batch, context=context, overlap=overlap)
    on = machines[machine]
    return {
        "c": roofline_of.cost_ratio(shapes[draft], shapes[target], step, on),
        "verify_ratios": roofline_of.verify_ratios(shapes[target], step, on, max_gamma).tolist(),
        "free_rows": 1.0 if shapes[target].has_experts and overlap < 1 else roofline_of.ridge_rows(on),
    }


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(formulas.acceptance, formulas.break_even_alpha, formulas.double_counted_tokens, formulas.expected_accepted),
        *(formulas.expected_tokens, formulas.expected_tokens_varying, formulas.kseq_acceptance),
        *(formulas.least_speedup, formulas.match_acceptance, formulas.operations_factor, formulas.optimal_acceptance),
        *(formulas.optimal_gamma, formulas.oracle_speedup, formulas.speedup, joint.block_tokens),
        *(lenience.lenient_acceptance, noise.chi_square, noise.chi_square_tail, noise.l1_noise_deviation),
        *(roofline, simulate.l1_noise),
    )
}
MOST_VALUES = 10_000  # of one call
MOST_CALLS = 64
MOST_SECONDS = 2
MOST_OF_FUNCTION = {"block_tokens": 16}  # instead of MOST_COUNTED: the cost grows exponentially with the argument
MOST_INTEGER = 10**7
MOST_COUNTED = 256  # of an argument that functions count up to
COUNTED = ("gamma", "max_gamma", "num_draws", "num_free")
MOST_WORDS = 256  # of a distribution


@dataclass
class Call:
    """A call of one function. arguments: numbers or arrays, which are broadcast together; distributions; or names."""

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Calls:
    """The calls that one HTTP request asks to evaluate."""

    calls: list[Call]


def make_router(llm: LLM | None = None) -> APIRouter:
    """Return the router with the HTTP route that evaluates formulas."""
    router, turn = APIRouter(), Lock()

    @router.post("/theory")
    def theory(body: Calls) -> dict[str, Any]:
        """Return the results in the order of the calls. Values that are not finite become null."""
        if len(body.calls) > MOST_CALLS:
            raise BadOption(f"{len(body.calls)} calls are too many: send at most {MOST_CALLS} at once")
        with turn:  # one request at a time, for numpy on small arrays holds the interpreter that the engine needs
            ends_s = time.monotonic() + MOST_SECONDS
            return {"results": [evaluated(call, ends_s) for call in body.calls]}

    return router


def evaluated(call: Call, ends_s: float = math.inf) -> Any:
    """Return the value of a call: a number, or nested lists in the shape to which the arguments are broadcast.

    ends_s: the time at which the evaluation is stopped, in seconds of the monotonic clock. Raises BadOption for an
    invalid call, and at that time.
    """
    function = FUNCTIONS.get(call.function)
    if function is None:
        raise BadOption(f"function={shown(call.function)} is not here: it must be one of {', '.join(FUNCTIONS)}")
    signature = inspect.signature(function)
    try:
        bound = signature.bind(**call.arguments).arguments
    except TypeError as error:
        names = ", ".join(signature.parameters)
        raise BadOption(f"{call.function}: {shown(str(error))}; it is {call.function}({names})") from None
    whole = {name: _whole(call, name, value) for name, value in bound.items() if _is_whole(signature, name)}
    whole |= {name: _name(call, name, value) for name, value in bound.items() if _annotation(signature, name) == "str"}
    scalars = {name: _numbers(call, name, value) for name, value in bound.items() if name not in whole}
    try:
        arrays = np.broadcast_arrays(*scalars.values()) if scalars else []
    except ValueError:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in scalars.items())
        raise BadOption(f"{call.function}: {shapes} cannot be broadcast against each other") from None
    size = arrays[0].size if arrays else 1
    if size > MOST_VALUES:
        raise BadOption(f"{call.function}: {size:,} values are too many: ask for at most {MOST_VALUES:,} at once")
    kinds = [_is_integer(signature, name) for name in scalars]
    results = []
    for values in zip(*(array.flat for array in arrays), strict=True) if arrays else [()]:
        if time.monotonic() > ends_s:
            raise BadOption(f"{call.function}: this takes more than {MOST_SECONDS} s: ask for less at once")
        given = [int(v) if is_integer else float(v) for v, is_integer in zip(values, kinds, strict=True)]
        try:
            results.append(_finite(function(**whole, **dict(zip(scalars, given, strict=True)))))
        except (ValueError, ArithmeticError, IndexError) as error:
            raise BadOption(f"{call.function}: {error}") from None
    return _nested(results, arrays[0].shape) if arrays else results[0]


def _annotation(signature: inspect.Signature, name: str) -> str:
    return str(signature.parameters[name].annotation)


def _is_whole(signature: inspect.Signature, name: str) -> bool:
    """Return whether a parameter takes a whole array, such as a distribution, and is not broadcast."""
    return _annotation(signature, name).startswith(("npt.ArrayLike", "Seq["))


def _is_integer(signature: inspect.Signature, name: str) -> bool:
    return _annotation(signature, name) == "int"


def _array(call: Call, name: str, value: Any) -> Any:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise BadOption(f"{call.function}: {name}={shown(value)} must be a number or an array of numbers") from None
    if not np.isfinite(array).all():
        raise BadOption(f"{call.function}: {name} must be finite")
    return array


def _whole(call: Call, name: str, value: Any) -> Any:
    array = _array(call, name, value)
    if array.ndim != 1 or array.size > MOST_WORDS:
        raise BadOption(f"{call.function}: {name} must be a list of at most {MOST_WORDS} numbers")
    return array


def _name(call: Call, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadOption(f"{call.function}: {name}={shown(value)} must be a name")
    return value


def _numbers(call: Call, name: str, value: Any) -> Any:
    array = _array(call, name, value)
    most = MOST_OF_FUNCTION.get(call.function, MOST_COUNTED) if name in COUNTED else MOST_INTEGER
    if _is_integer(inspect.signature(FUNCTIONS[call.function]), name) and (
        (array != np.floor(array)).any() or (np.abs(array) > most).any()
    ):
        raise BadOption(f"{call.function}: {name}={shown(value)} must be whole, and at most {most}")
    return array


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(part) for part in value]
    return value if value is None or math.isfinite(value) else None


def _nested(values: list[Any], shape: tuple[int, ...]) -> Any:
    if not shape:
        return values[0]
    step = math.prod(shape[1:])
    return [_nested(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]
