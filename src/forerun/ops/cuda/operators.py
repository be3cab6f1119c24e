"""The CUDA operators: the interface of ops/reference.py, implemented by Triton kernels.

Rows are float32 between two operators, whatever the dtype of the weights. The inputs of a product are rounded to the
dtype of its weights. Queries are rounded, too, and so are keys and values before they enter the cache. The bits of a
row depend only on that row, its keys and values, and the card. The number of rows changes no bits, because tiles of
rows are padded, and because the inputs of a product and the keys of a row are cut into fixed parts. The place of a
token in the cache changes no bits either (ops/cuda/kernels.py, docs/development/gpu.md).

Under Triton's interpreter (TRITON_INTERPRET=1) the same kernels run on a CPU, slowly, for tests.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from forerun.blocks import Act, Norm
from forerun.ops.cuda.packed import STEP, TILE, Packed, packs
from forerun.ops.cuda.rows import Rows, rows_of_view
from forerun.ops.quantised import Scheme
from forerun.ops.reference import PLAIN, ReferenceOps, Scoring
from forerun.ops.torch_pools import TorchPool
from forerun.types import CacheView

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_SHARED_BYTES = 99 << 10  # of a program on cards of 8.6, 8.9 and 12.0; an H100 has 227 KiB
SPLIT_KEYS = 128  # keys of a part of attention
KEYS = 64  # keys of one step, for heads of up to WIDE_BYTES
WIDE_BYTES = 512
ROWS = (16, 32, 64)  # of a tile; 16 is what the matrix instructions take at least
AHEAD_LINES = 2  # cache lines of 128 bytes of each output's weights that are prefetched
AHEAD_BYTES = 8192  # of codes that a program prefetches
PROGRAMS = 384  # the least number for a product of codes, where K can be cut into enough parts
PART_IDS = 4096  # logits that one program looks through
PARTS_BYTES = 64 << 20  # of attention parts that are in memory at once


def interprets() -> bool:
    """Tell whether Triton runs kernels in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(frozen=True)
class Tiles:
    """The division of a product into tiles.

    outs, ins: the numbers of outputs and inputs of a tile of weights. splits: the number of parts into which the inputs
    are cut. part: the number of inputs of each part, a multiple of `ins`.
    """

    outs: int
    ins: int
    splits: int
    part: int
    warps: int = 4
    stages: int = 6

    @classmethod
    @cache
    def of(cls, num_out: int, num_in: int, itemsize: int, times: int = 1) -> Tiles:
        """Return how to cut a matrix into tiles. The result does not depend on the number of rows of a pass.

        times: the number of matrices of this size by which each row is multiplied in one call, such as one for each of
        the row's experts.
        """
        ins = 128 if itemsize == 2 else 64
        while ins > 16 and ins >= 2 * num_in:
            ins //= 2
        outs = 64 if num_out >= 16384 else 32
        steps = -(-num_in // ins)
        # Enough programs to keep the memory busy, as long as a part has a few steps (docs/development/gpu.md).
        splits = 1
        while (-(-num_out // outs) * splits * times < 256 or ins * steps // splits > 4096) and steps // (
            2 * splits
        ) >= 4:
            splits *= 2
        return cls(outs, ins, splits, -(-steps // splits) * ins, stages=6 if itemsize == 2 else 4)


@dataclass(frozen=True)
class CodeTiles:
    """The division of a product of packed codes into parts.

    steps: the number of all steps, with STEP inputs each. splits: the number of parts into which the steps are divided.
    part: the number of steps of each part.
    """

    steps: int
    splits: int
    part: int
    warps: int = 4
    stages: int = 4

    @classmethod
    @cache
    def of(cls, num_out: int, num_in: int, times: int = 1) -> CodeTiles:
        """Return the tiles of a matrix, which do not depend on the number of rows of a pass. times: see Tiles.of."""
        tiles, steps = -(-num_out // TILE), -(-num_in // STEP)
        # Three programs or more for each processor of a large card, as long as a part has two steps.
        splits = 1
        while tiles * splits * times < PROGRAMS and steps // (2 * splits) >= 2:
            splits *= 2
        part = -(-steps // splits)
        return cls(steps, -(-steps // part), part)


@dataclass(frozen=True)
class PartialSums:
    """A matrix product as partial sums [splits, T, O], to be added in order, and a bias that is not added yet."""

    sums: Tensor
    bias: Tensor | None

    @property
    def splits(self) -> int:
        """The number of parts."""
        return len(self.sums)


class CudaOps(ReferenceOps):
    """The operators of ReferenceOps as Triton kernels. Dense weights are tensors on the device in one of DTYPES."""

    def __init__(self) -> None:
        super().__init__()
        self.row_invariant, self.extra_row, self.name = True, 0.01, "cuda"
        # Biases of relative positions by distance, by the id of a Scoring, which is kept so that the id stays valid.
        self._biases: dict[int, tuple[Scoring, Tensor]] = {}
        from forerun.ops.cuda import expert_kernels, kernels

        self.kernels: Any = kernels
        self.expert_kernels: Any = expert_kernels
        # On cards that can, a kernel begins before the previous one has ended (programmatic dependent launch).
        self.early = not interprets() and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
        self.shared_bytes = _shared_bytes()
        # Fusion is set here because Triton's default, and with it the bits, changes from version to version.
        self.launch: dict[str, Any] = {"EARLY": self.early, "enable_fp_fusion": True}
        if self.early:
            self.launch["launch_pdl"] = True

    @property
    def build(self) -> str:
        """The version of Triton and the name of the card.

        Results are bitwise equal, and measured speeds are valid, only with the same version on the same card.
        """
        import triton

        card = "interpreter" if interprets() else torch.cuda.get_device_name()
        return f"Triton {triton.__version__}, {card}"

    def auto_dtype(self, device: str, stored: str) -> str:
        """Return the stored dtype if it has 16 bits, otherwise bfloat16."""
        return stored if stored in ("bfloat16", "float16") else "bfloat16"

    def rows_dtype(self, weights: str) -> str:
        """Return float32, whatever the weights are."""
        return "float32"

    def packs_scheme(self, scheme: Scheme) -> bool:
        """Tell whether a model takes a QuantisedMatrix of this scheme in place of a tensor."""
        return packs(scheme)

    # ------------------------------------------------------------------------------------------------- products

    def product(
        self, x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None, *, whole: bool = False
    ) -> PartialSums:
        """Multiply x [T, I] by weight [O, I].

        whole: whether to add the bias at once if the product has only one part. Otherwise the bias is returned in
        PartialSums.
        """
        if isinstance(weight, Packed):
            return self._product_of_codes(x, weight, bias, whole=whole)
        x = x if x.dtype == weight.dtype else x.to(weight.dtype)
        num, (num_out, num_in) = len(x), weight.shape
        tiles = Tiles.of(num_out, num_in, weight.itemsize)
        rows, outs = self.cut(num, tiles.outs)
        even = tiles.part * tiles.splits == num_in and num_out % outs == 0
        lines = min(AHEAD_LINES, tiles.part * weight.itemsize // 128) if even else 0
        adds_bias = whole and bias is not None and tiles.splits == 1
        sums = torch.empty(tiles.splits, num, num_out, dtype=torch.float32, device=x.device)
        grid = (-(-num // rows), -(-num_out // outs), tiles.splits)
        self.kernels.product[grid](
            x,
            weight,
            bias if adds_bias else weight,
            sums,
            num,
            num_out,
            num_in,
            x.stride(0),
            weight.stride(0),
            ROWS=rows,
            OUTS=outs,
            INS=tiles.ins,
            PART=tiles.part,
            SPLITS=tiles.splits,
            EVEN=even,
            BIAS=adds_bias,
            PRECISION=_precision(weight.dtype),
            LINES=lines,
            LINE=128 // weight.itemsize,
            num_warps=tiles.warps,
            num_stages=self.stages(tiles.stages, (rows + outs) * tiles.ins * weight.itemsize),
            **self.launch,
        )
        return PartialSums(sums, None if adds_bias else bias)

    def stages(self, most: int, num_bytes: int) -> int:
        """Return how many steps of a product are in flight at once, `most` at most.

        Each step takes `num_bytes` of shared memory. The number does not change the product.
        """
        return max(1, min(most, self.shared_bytes // num_bytes))

    def _product_of_codes(self, x: Tensor, weight: Packed, bias: Tensor | None, *, whole: bool) -> PartialSums:
        x = x if x.dtype == weight.dtype else x.to(weight.dtype)
        num, (num_out, num_in) = len(x), weight.shape
        tiles = CodeTiles.of(num_out, num_in)
        rows = self.cut(num, TILE)[0]
        adds_bias = whole and bias is not None and tiles.splits == 1
        sums = torch.empty(tiles.splits, num, num_out, dtype=torch.float32, device=x.device)
        step_bytes = STEP * TILE * weight.bits // 8
        self.kernels.product_of_codes[(-(-num // rows), -(-num_out // TILE), tiles.splits)](
            x,
            *weight.for_kernels,
            bias if adds_bias else weight.scales,
            sums,
            num,
            num_out,
            num_in,
            tiles.steps,
            tiles.part,
            x.stride(0),
            ROWS=rows,
            **self.code_constants(weight),
            BIAS=adds_bias,
            PRECISION=_precision(torch.bfloat16),
            STAGES=tiles.stages,
            LINES=min(AHEAD_BYTES, step_bytes) // 128,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **self.launch,
        )
        return PartialSums(sums, None if adds_bias else bias)

    @staticmethod
    def code_constants(weight: Packed) -> dict[str, Any]:
        """Return the compile-time constants of the kernels that multiply by this packed matrix."""
        return {
            "KIND": weight.kind,
            "GROUP": weight.group,
            "SUPER": weight.super_group,
            "ZERO": weight.zero,
            "ZEROS": weight.zeros is not None,
            "MINIMUMS": weight.minimums is not None,
            "SUPER_MINIMUMS": weight.super_minimums is not None,
            "EVEN": weight.num_in % STEP == 0,
        }

    @staticmethod
    def cut(num: int, outs: int) -> tuple[int, int]:
        """Return the number of rows and the number of outputs of a tile, for a pass of `num` rows.

        outs: the number of outputs of a tile in a pass of few rows. Neither of the two returned numbers changes the
        bits of the product's rows. The bits depend on how Tiles cuts the inputs.
        """
        rows = next((rows for rows in ROWS if num <= rows), ROWS[-1])
        return rows, max(outs, 64) if rows == ROWS[-1] else outs

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """Multiply: x [T, I], weight [O, I], bias [O] -> float32 [T, O]."""
        num, num_out = x.shape[0], weight.shape[0]
        if num == 0:
            return torch.empty(0, num_out, dtype=torch.float32, device=x.device)
        product = self.product(x if x.stride(-1) == 1 else x.contiguous(), weight, bias, whole=True)
        if product.splits == 1 and product.bias is None:
            return product.sums[0]
        out = torch.empty(num, num_out, dtype=torch.float32, device=x.device)
        block = min(1024, _power(num_out))
        self.kernels.summed[(num, -(-num_out // block))](
            product.sums,
            product.sums if product.bias is None else product.bias,
            out,
            num,
            num_out,
            SPLITS=product.splits,
            BIAS=product.bias is not None,
            BLOCK=block,
            **self.launch,
        )
        return out

    def inner(self, act: Act, gated: bool, product: PartialSums, dtype: torch.dtype) -> Tensor:
        """Return the inner rows [T, size] of a feed-forward part, in `dtype`.

        product: the product to which the activation is applied. gated: whether the product has outputs of gate and up.
        """
        _, num, width = product.sums.shape
        size = width // 2 if gated else width
        out = torch.empty(num, size, dtype=dtype, device=product.sums.device)
        block = min(512, _power(size))
        self.kernels.activated[(num, -(-size // block))](
            product.sums,
            product.sums if product.bias is None else product.bias,
            out,
            num,
            size,
            SPLITS=product.splits,
            BIAS=product.bias is not None,
            GATED=gated,
            ACT=act,
            BLOCK=block,
            **self.launch,
        )
        return out

    def activated(self, act: Act, x: Tensor) -> Tensor:
        """Apply an activation to every element of x."""
        rows = x.flatten(0, -2).contiguous()
        return self.inner(act, False, PartialSums(rows[None], None), torch.float32).view(x.shape)

    def gated(self, act: Act, gate: Tensor, up: Tensor) -> Tensor:
        """Compute act(gate) * up of rows [T, size]."""
        return self.inner(act, True, PartialSums(torch.cat((gate, up), -1)[None], None), torch.float32)

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Find the largest logit of each row [T, V]. Ties go to the lowest id, and NaN counts as infinity.

        Returns the ids and values, float32 [2, T], and the ids again, int32 [T]. Where the value is infinite, the int32
        id is -1.
        """
        num, device = len(logits), logits.device
        values, ids = self.largest_in_parts(logits, PART_IDS)
        parts = values.shape[1]
        pairs = torch.empty(2, num, dtype=torch.float32, device=device)
        best = torch.empty(num, dtype=torch.int32, device=device)
        if num:
            self.kernels.largest_of_parts[(num,)](values, ids, pairs, best, parts, BLOCK=_power(parts), **self.launch)
        return pairs, best

    def largest_in_parts(self, logits: Tensor, part_ids: int) -> tuple[Tensor, Tensor]:
        """Return the value and the token id of the largest logit in each part of `part_ids` ids.

        The values are float32 [T, parts], and the ids are int32 [T, parts].
        """
        num, width = logits.shape
        parts = -(-width // part_ids)
        values = torch.empty(num, parts, dtype=torch.float32, device=logits.device)
        ids = torch.empty(num, parts, dtype=torch.int32, device=logits.device)
        if num:
            self.kernels.largest_in_parts[(num, parts)](
                logits, values, ids, width, BLOCK=min(part_ids, _power(width)), **self.launch
            )
        return values, ids

    # ---------------------------------------------------------------------------------------------------- norms

    def added(
        self,
        x: Tensor,
        branch: PartialSums | None,
        post: tuple[Norm, Tensor | None, Tensor | None] | None,
        pre: tuple[Norm, Tensor | None, Tensor | None] | None,
        dtype: torch.dtype,
        *,
        at_sum: bool = False,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Add a branch, after its norm `post`, to rows x [T, H].

        Returns the sums, and the sums after the norm `pre`. at_sum: whether `post` norms the sums instead of the
        branch. scale: the factor of the branch.
        """
        num, width = x.shape
        sums = x if branch is None else torch.empty_like(x)
        out = torch.empty(num, width, dtype=dtype, device=x.device)
        if num == 0:
            return sums, out
        (post_kind, post_w, post_b, post_eps, post_off), (pre_kind, pre_w, pre_b, pre_eps, pre_off) = map(
            _norm_of, (post, pre)
        )
        bias = None if branch is None else branch.bias
        self.kernels.added[(num,)](
            x,
            x if branch is None else branch.sums,
            x if bias is None else bias,
            x if post_w is None else post_w,
            x if post_b is None else post_b,
            x if pre_w is None else pre_w,
            x if pre_b is None else pre_b,
            sums,
            out,
            num,
            width,
            float(scale),
            post_eps,
            post_off,
            pre_eps,
            pre_off,
            SPLITS=0 if branch is None else branch.splits,
            PARTS_BIAS=bias is not None,
            POST=post_kind,
            POST_WEIGHT=post_w is not None,
            POST_BIAS=post_b is not None,
            AT_SUM=at_sum,
            PRE=pre_kind,
            PRE_WEIGHT=pre_w is not None,
            PRE_BIAS=pre_b is not None,
            HAS_SUMS=branch is not None,
            BLOCK=_power(width),
            num_warps=4 if width <= 1024 else 8,
            **self.launch,
        )
        return sums, out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the root mean square norm over the last dimension, in float32 (Zhang and Sennrich 2019, eq. 4)."""
        return self._norm(x, (Norm(eps=eps), weight, None))

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Compute the layer norm over the last dimension, in float32 (Ba et al. 2016, eq. 4)."""
        return self._norm(x, (Norm("layer", eps), weight, bias))

    def _norm(self, x: Tensor, norm: tuple[Norm, Tensor | None, Tensor | None]) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.is_contiguous() else rows.contiguous()
        return self.added(rows, None, None, norm, torch.float32)[1].view(x.shape)

    # ------------------------------------------------------------------------------------------------ attention

    def plan(self, view: CacheView, device: torch.device | str = "cpu") -> Any:
        """Return the plan of a pass on the device, which lists the cache rows of the keys that each row sees."""
        return rows_of_view(view, torch.device(device))

    def attention(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        pool: TorchPool | None,
        view: CacheView | None,
        window: int | None,
        scoring: Scoring = PLAIN,
    ) -> Tensor:
        """Write k, v [T, kv_heads, D] into a layer's pool, then attend: q [T, heads, D] -> float32 [T, heads, D]."""
        assert view is not None
        rows = rows_of_view(view, q.device)
        if pool is None:
            assert k is not None
            assert v is not None
            pool = TorchPool(k.contiguous(), v.contiguous())
            k = None
            v = None
        if k is not None and v is not None and len(k):
            width = pool.keys.shape[1] * pool.keys.shape[2]
            block = min(1024, _power(width))
            self.kernels.written[(len(k), -(-width // block))](
                rows.writes,
                k.contiguous(),
                v.contiguous(),
                pool.keys,
                pool.values,
                WIDTH=width,
                BLOCK=block,
                **self.launch,
            )
        return self.attend(q.float().contiguous(), pool, rows, window, scoring, torch.float32)

    def attend(
        self, q: Tensor, pool: TorchPool, rows: Rows, window: int | None, scoring: Scoring, dtype: torch.dtype
    ) -> Tensor:
        """Attend with queries [T, heads, D] over the keys that rows see -> [T, heads, D] of type `dtype`."""
        num, heads, dim = q.shape
        out = torch.empty(num, heads, dim, dtype=dtype, device=q.device)
        splits = max(1, -(-rows.num_keys // SPLIT_KEYS))
        most = max(1, PARTS_BYTES // (heads * splits * (dim + 2) * 4)) if splits > 1 else max(num, 1)
        for start in range(0, num, most):
            self._attend(q, pool, rows, window, scoring, out, splits, range(start, min(start + most, num)))
        return out

    def _attend(
        self,
        q: Tensor,
        pool: TorchPool,
        rows: Rows,
        window: int | None,
        scoring: Scoring,
        out: Tensor,
        splits: int,
        chosen: range,
    ) -> None:
        heads, dim = q.shape[1:]
        kv_heads, num = pool.keys.shape[1], len(chosen)
        queries, out = q[chosen.start : chosen.stop], out[chosen.start : chosen.stop]
        lengths, seen, runs, tails, places = rows.part(chosen.start, chosen.stop)
        parts, stats = out, out
        if splits > 1:
            parts = torch.empty(num, heads, splits, dim, dtype=torch.float32, device=q.device)
            stats = torch.empty(num, heads, splits, 2, dtype=torch.float32, device=q.device)
        sinks = out if scoring.sinks is None else scoring.sinks
        biases = self._by_distance(scoring)
        sees_all = scoring.sees_all and (window is not None or biases is not None)
        scale = dim**-0.5 if scoring.scale is None else scoring.scale
        block = max(16, _power(dim))
        # For wide heads a step has fewer keys, so that its keys and values fit on any card.
        wide = max(1, block * pool.keys.element_size() // WIDE_BYTES)
        keys = max(16, KEYS // wide)
        self.kernels.attended[(num, kv_heads, splits)](
            queries,
            pool.keys,
            pool.values,
            lengths,
            seen,
            runs,
            tails,
            rows.tables,
            places,
            out if biases is None else biases,
            sinks,
            parts,
            stats,
            out,
            rows.tails.stride(0),
            rows.tables.stride(0),
            rows.block_tokens,
            window or 0,
            0 if scoring.buckets is None else scoring.buckets.max_distance,
            float(scale),
            float(scoring.softcap or 1.0),
            splits,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            GROUP=max(16, _power(heads // kv_heads)),
            BLOCK=block,
            SPLIT_KEYS=SPLIT_KEYS,
            KEYS=keys,
            WINDOW=window is not None,
            SEES_ALL=sees_all,
            BIAS=biases is not None,
            SOFTCAP=scoring.softcap is not None,
            SINKS=scoring.sinks is not None,
            DIRECT=splits == 1,
            PRECISION=_precision(pool.keys.dtype),
            num_warps=4 if wide == 1 else 8,
            num_stages=self.stages(2, 2 * keys * block * pool.keys.element_size()),
            **self.launch,
        )
        if splits > 1:
            self.kernels.parts_joined[(num, heads)](
                parts,
                stats,
                sinks,
                lengths,
                places,
                out,
                window or 0,
                splits,
                HEADS=heads,
                DIM=dim,
                BLOCK=block,
                SPLIT_KEYS=SPLIT_KEYS,
                WINDOW=window is not None,
                SEES_ALL=sees_all,
                SINKS=scoring.sinks is not None,
                num_warps=1 if dim <= 64 else 2,
                **self.launch,
            )

    def _by_distance(self, scoring: Scoring) -> Tensor | None:
        """Return the biases of the distances from a row back to a key, or None if `scoring` has no biases.

        The biases are float32 [heads, 2 reach + 1], for distances from -reach to reach.
        """
        if scoring.buckets is None or scoring.table is None:
            return None
        if id(scoring) not in self._biases:
            reach = scoring.buckets.max_distance
            distances = torch.arange(-reach, reach + 1, device=scoring.table.device)
            biases = scoring.bias(distances[None])
            assert biases is not None
            self._biases[id(scoring)] = scoring, biases[:, 0].contiguous()
        return self._biases[id(scoring)][1]


def _shared_bytes() -> int:
    """Return the bytes of shared memory that one program may have on this card.

    Without a card, return LEAST_SHARED_BYTES, the number for the smallest cards.
    """
    if interprets() or not torch.cuda.is_available():
        return LEAST_SHARED_BYTES
    driver: Any = importlib.import_module("triton.runtime").driver.active
    return int(driver.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"])


def _power(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _precision(dtype: torch.dtype) -> str:
    """Return the PRECISION of kernels that multiply a dtype (see kernels._dot). float32 is not multiplied as TF32."""
    if interprets():
        return "widened"
    return "ieee" if dtype == torch.float32 else "tf32"


def _norm_of(
    norm: tuple[Norm, Tensor | None, Tensor | None] | None,
) -> tuple[str, Tensor | None, Tensor | None, float, float]:
    if norm is None:
        return "none", None, None, 0.0, 0.0
    kind, weight, bias = norm
    return kind.kind, weight, bias, float(kind.eps), float(kind.offset)
