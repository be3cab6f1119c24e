"""The backends that compute models. A backend is a file or a subfolder of this folder that defines NAME.

Backends are found by a scan of the folder, and are listed nowhere else. The file of a backend defines these names:

    NAME                                        the backend's name in the option `ops`
    RANK                                        its rank: auto prefers high ranks; 0 = auto never takes it
    DEVICE                                      the only device to compute on, "cpu" or "cuda"; left out = both
    NEEDS = "torch"                             given where the file imports torch; left out = numpy is enough
    usable(device) -> reason or None            why the backend cannot run on a device, worded to follow NAME
    supports(spec) -> reason or None            why the backend does not compute a model
    row_invariant                               whether a row's result has the same bits in every batch
    KV_DTYPES                                   the values of kv_cache_dtype; left out = the model's own dtype
    make() -> operators                         the operators, see operators.py
    load(spec, weights, operators, ...)         a model; see `load_model`
    sizes(wanted) -> Sizes                      the memory that weights and passes take
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from forerun import native
from forerun.errors import BadOption, UnsupportedModel, has_card
from forerun.registry import stated, unknown

if TYPE_CHECKING:
    from forerun.blocks import CacheShape, Spec
    from forerun.ops.memory import Sizes, Wanted
    from forerun.ops.model import LoadedModel, Model
    from forerun.ops.operators import Operators
    from forerun.ops.passes import Lent

MOST_HEAD_DIM = 1024  # for keys and values in 8 bits, as in csrc/kernels.h


class Backend(Protocol):
    """The names that a file of this folder must define to be a backend."""

    NAME: str
    RANK: int
    row_invariant: bool

    def usable(self, device: str) -> str | None: ...
    def supports(self, spec: Spec) -> str | None: ...
    def make(self) -> Operators: ...
    def load(
        self,
        spec: Spec,
        weights: Mapping[str, Any],
        operators: Operators,
        *,
        device: str = "cpu",
        consume: bool = False,
        lent: Lent | None = None,
    ) -> LoadedModel: ...
    def sizes(self, wanted: Wanted) -> Sizes: ...


@cache
def files() -> Mapping[str, str]:
    """Map each backend's name to its module's name, sorted by RANK from high to low. Imports no backend."""
    names, ranks = stated(__name__, "NAME"), stated(__name__, "RANK")
    return {names[file]: file for file in sorted(names, key=lambda file: -int(ranks[file]))}


def backends() -> Mapping[str, Backend]:
    """Map each backend's name to the backend, in the order of `files`. Backends without their library are left out."""
    return {name: backend(name) for name in files() if why_no_import(name) is None}


def backend(name: str) -> Backend:
    """Return a backend by name. Raises BadOption for an unknown name, and if the backend needs a missing library."""
    if name not in files():
        raise BadOption(unknown("backend", name, ["auto", *files()]))
    if (reason := why_no_import(name)) is not None:
        raise BadOption(f"ops={name!r} {reason}")
    return cast(Backend, importlib.import_module(f"{__name__}.{files()[name]}"))


@cache
def why_no_import(name: str) -> str | None:
    """Return None if a backend's file can be imported, otherwise the reason, worded to follow the backend's name."""
    is_missing = _states(name, "NEEDS") == "torch" and native.torch_version() is None
    return f"is not possible: {native.needs_torch('it')}" if is_missing else None


def refuse_without_torch(device: str) -> None:
    """Raise BadOption if `device` is "cuda" and torch, the only way to a CUDA device, is missing."""
    if device != "cuda" or native.torch_version() is not None:
        return
    if not has_card():
        raise BadOption("device='cuda' is not possible: it needs an NVIDIA card, which is not here; use device='cpu'")
    raise BadOption(f"device='cuda' is not possible: {native.needs_torch('a CUDA device', 'cuda')}")


@cache
def _states(name: str, constant: str) -> str | None:
    return stated(__name__, constant).get(files()[name])


def resolve(name: str, device: str, spec: Spec | None = None) -> str:
    """Resolve "auto" to the name of a backend on a device; return any other name unchanged.

    spec: the spec of the model to compute, if known. Raises BadOption for a backend that cannot run on the device, and
    UnsupportedModel for a backend that does not compute the model.
    """
    refuse_without_torch(device)
    if name == "auto":
        name = next(
            (candidate for candidate in _ranked(device) if why_not(candidate, device, spec) is None), "reference"
        )
        if (reason := why_no_import(name)) is not None:
            kernels = why_not("native", device, spec)
            raise BadOption(f"nothing here computes the model: ops='native' {kernels}; and ops='reference' {reason}")
    if (reason := backend(name).usable(device)) is not None:
        raise BadOption(f"ops={name!r} {reason}")
    if spec is not None and (reason := backend(name).supports(spec)) is not None:
        raise UnsupportedModel(f"model_type={spec.model_type!r} cannot run on ops={name!r}: {reason}")
    return name


def beside(name: str, target: str, device: str, target_spec: Spec, spec: Spec) -> str:
    """Return the name of the backend that computes a draft model. Raises the errors of `resolve`.

    name: the option `ops`. Any value but "auto" names the backend of all models. target: the name of the backend that
    runs the target model. "auto" takes the best backend for each model, with one exception. If the target runs on a
    backend that "auto" would not choose for the target, the draft model runs on the target's backend too, provided that
    this backend can compute the draft model.
    """
    if name == "auto" and target != resolve("auto", device, target_spec) and why_not(target, device, spec) is None:
        return target
    return resolve(name, device, spec)


def why_not(name: str, device: str, spec: Spec | None) -> str | None:
    """Return None if a backend can compute a model on a device, otherwise the reason. spec: None = any model."""
    if (reason := why_no_import(name)) is not None:
        return reason
    module = backend(name)
    reason = module.usable(device)
    return reason if reason is not None or spec is None else module.supports(spec)


def faster(name: str, device: str, spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield (backend, reason) for each backend that `auto` ranks above `name` but that cannot compute the model."""
    ranked = list(_ranked(device))
    for other in ranked[: ranked.index(name)] if name in ranked else ():
        if (reason := why_not(other, device, spec)) is not None:
            yield other, reason


def _ranked(device: str) -> Iterator[str]:
    """Yield the names of the backends that `auto` may choose on a device, sorted by RANK from high to low."""
    for name in files():
        if _states(name, "RANK") != "0" and (_states(name, "DEVICE") or device) == device:
            yield name


def make(name: str, device: str, spec: Spec | None = None) -> Operators:
    """Return a backend's operators. Every call returns the same object. Raises the errors of `resolve`."""
    return backend(resolve(name, device, spec)).make()


def kv_dtype(option: str, model: Model, *, must: bool = True) -> str:
    """Return the dtype of a loaded model's KV cache under the option kv_cache_dtype; see kept_dtype."""
    return kept_dtype(option, model.ops.name, model.config.cache_shape, model.cache_dtype, must=must)


def kept_dtype(option: str, name: str, shape: CacheShape, model_dtype: str, *, must: bool = True) -> str:
    """Return the dtype of a KV cache of this shape under the option kv_cache_dtype.

    name: the backend that computes the model. model_dtype: the model's own cache dtype. must: what to do if the backend
    cannot keep the cache in the wanted dtype. True = raise BadOption; False = return `model_dtype`.
    """
    if option in ("auto", model_dtype):
        return model_dtype
    reason = None
    if option not in kv_dtypes(name):
        reason = f"needs a CPU's native operators and contradicts ops={name!r}: drop one"
    elif option == "int8" and max((shape.size_of(layer)[1] for layer in shape.kept), default=0) > MOST_HEAD_DIM:
        reason = f"takes heads of up to {MOST_HEAD_DIM:,} dimensions, and this model's are larger: leave it out"
    if reason is None:
        return option
    if must:
        raise BadOption(f"kv_cache_dtype={option!r} {reason}")
    return model_dtype


def kv_dtypes(name: str) -> Collection[str]:
    """Return the values of kv_cache_dtype that a backend takes besides the model's own; () for an unknown backend."""
    return getattr(backend(name), "KV_DTYPES", ()) if name in files() else ()


def load_model(
    spec: Spec,
    weights: Mapping[str, Any],
    operators: Operators,
    *,
    device: str = "cpu",
    consume: bool = False,
    lent: Lent | None = None,
) -> LoadedModel:
    """Make a model from a spec and its weights, for these operators to compute.

    weights: a tensor for every name of `blocks.weights(spec)`, in the shape that `blocks.weights` gives. They are host
    tensors of one dtype, or torch tensors on one device. Each weight is looked up only once, so a later change to a
    weight must be made in place. device: "cpu" or "cuda". consume: whether a backend that packs weights may free the
    tensors while it packs them, so that no weight is in memory twice. If so, the caller must not use the mapping again.
    lent: for a draft head, the parts that it borrows from its target. The target must use the same operators. Raises
    UnsupportedModel for a spec that the backend does not compute.
    """
    if operators.name in files() and (reason := backend(operators.name).supports(spec)) is not None:
        raise UnsupportedModel(f"model_type={spec.model_type!r} cannot run on ops={operators.name!r}: {reason}")
    load = operators.loader or backend(operators.name).load
    model: LoadedModel = load(spec, weights, operators, device=device, consume=consume, lent=lent)
    return model
