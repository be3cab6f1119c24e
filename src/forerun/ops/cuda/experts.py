"""Mixtures of experts on a CUDA device. The launches of a pass do not depend on the experts that are chosen.

So one CUDA graph serves every choice. The bits of a row depend on that row alone; see ops/cuda/expert_kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forerun.ops.cuda.operators import ROWS, CodeTiles, CudaOps, PartialSums, Tiles, _power, _precision
from forerun.ops.cuda.packed import TILE, Packed
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import TorchBlock, TorchExperts, TorchMlp
from forerun.ops.torch_parts import normed

BLOCK_PAIRS = 1024  # pairs of a row and an expert that are looked through at once


class ExpertCounts:
    """The numbers of tiles and of chosen experts in one pass, int32 [layers, 2], for each layer with experts.

    live [T]: 0 = the row is padding, for which no experts are chosen; None = there is no padding.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_layers, 2, dtype=torch.int32, device=device)
        self.live: Tensor | None = None
        self._host = torch.zeros(num_layers, 2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._awaited: tuple[list[int], list[int]] | None = None

    def fetch(self, to: list[int], layers: list[int]) -> None:
        """Copy this pass's counts to the host.

        to: the list to which `append_counts` will append the number of chosen experts of each layer in `layers`.
        """
        self._host.copy_(self.counts, non_blocking=True)
        self._awaited = to, layers

    def append_counts(self) -> None:
        """Append the numbers of chosen experts to the list that `fetch` was given. The device must have finished."""
        if self._awaited is not None:
            to, layers = self._awaited
            to += [int(self._host[i, 1]) for i in layers]
            self._awaited = None


@dataclass(frozen=True)
class _Choice:
    """The experts that were chosen for the rows of a pass, on the device.

    ids, shares [T, chosen]: the experts of each row, and their weights. order, tiles, counts: see
    expert_kernels.grouped. num_tiles: the largest possible number of tiles. rows: the number of pairs that fit in a
    tile.
    """

    ids: Tensor
    shares: Tensor
    order: Tensor
    tiles: Tensor
    counts: Tensor
    num_tiles: int
    rows: int

    @property
    def num_pairs(self) -> int:
        """The number of pairs of a row and one of its experts."""
        return self.ids.numel()


class _Matrices:
    """The matrices of all experts for one product, such as all down projections.

    biases: [experts, O]; None = there are no biases. first: the first expert's matrix.
    """

    def __init__(self, parts: Seq[tuple[Any, Tensor | None]], times: int) -> None:
        self.kept = _alike([part for part, _ in parts])  # keeps tensors alive whose addresses are used
        self.first: Any = self.kept[0]
        self.num_out, self.num_in = self.first.shape
        self.dtype: torch.dtype = self.first.dtype
        device = self.first.device
        addresses = [[tensor.data_ptr() for tensor in _tensors(part)] for part in self.kept]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        biases = [bias for _, bias in parts if bias is not None]
        self.biases = torch.stack(biases) if biases else None
        self.is_packed = isinstance(self.first, Packed)
        cut = CodeTiles.of if self.is_packed else partial(Tiles.of, itemsize=self.first.itemsize)
        self.cut: Any = cut(self.num_out, self.num_in, times=times)


def _tensors(part: Any) -> list[Tensor]:
    """Return the tensors of a matrix, in the order in which kernels take their addresses."""
    return part.for_kernels if isinstance(part, Packed) else [part]


def _alike(parts: Seq[Any]) -> list[Any]:
    """Return matrices as the kernels read them: all packed in the same form, or all dense and aligned to 16 bytes."""
    kinds = {
        tuple(map(_kind, [getattr(part, entry.name) for entry in fields(part)])) for part in parts if _packed(part)
    }
    if len(kinds) == 1 and all(map(_packed, parts)):
        return list(parts)
    dense = [part.float().to(part.dtype) if _packed(part) else part for part in parts]
    return [part if part.data_ptr() % 16 == 0 and part.is_contiguous() else part.contiguous().clone() for part in dense]


def _packed(part: Any) -> bool:
    return isinstance(part, Packed)


def _kind(value: Any) -> Any:
    """Return the property of a field's value that must be equal for all experts.

    The property of a tensor is its dtype and shape. For any other value, it is the value itself.
    """
    return (value.dtype, value.shape) if isinstance(value, Tensor) else value


class CudaExperts(TorchExperts):
    """A mixture whose experts are chosen on the device.

    base: the same mixture in torch. layer: the index of the mixture in the counts.
    """

    def __init__(self, ops: CudaOps, base: TorchExperts, dtype: torch.dtype, counts: ExpertCounts, layer: int) -> None:
        vars(self).update(vars(base))
        self.ops, self.dtype, self.expert_counts, self.layer = ops, dtype, counts, layer
        self.up = _Matrices([_whole(expert.up) for expert in self.experts], self.spec.chosen)
        self.down = _Matrices([expert.down.parts[0] for expert in self.experts], self.spec.chosen)

    def run(self, ops: ReferenceOps, y: Tensor, stream: Tensor) -> tuple[Tensor, int]:
        """Apply the mixture to y [T, H] -> float32 [T, H]. The returned count is 0; the counts are in ExpertCounts."""
        return self.partial_sums(y, stream).sums[0], 0

    def partial_sums(self, y: Tensor, stream: Tensor) -> PartialSums:
        """Apply the mixture to y [T, H] -> float32 [1, T, H], the result of `run` as PartialSums."""
        ops, e = self.ops, self.spec
        choice = self.choose(normed(self.router_norm, ops, stream if e.reads_stream else y))
        y = y.to(self.up.dtype).contiguous()
        outputs = self._product(y, self.up, choice, each=e.chosen)
        inner = ops.inner(e.mlp.act, e.mlp.gated, PartialSums(outputs, None), self.down.dtype)
        outputs = self._product(inner, self.down, choice, each=1)
        shared = None if self.shared is None else _mlp(ops, self.shared, y, self.dtype)
        gates = None if self.shared_gate is None else ops.product(y, *self.shared_gate.parts[0])
        num, width = y.shape
        out = torch.empty(1, num, width, dtype=torch.float32, device=y.device)
        block = min(512, _power(width))
        ops.expert_kernels.experts_added[(num, -(-width // block))](
            outputs,
            choice.ids,
            choice.shares,
            outputs if shared is None else shared.sums,
            outputs if shared is None or shared.bias is None else shared.bias,
            outputs if gates is None else gates.sums,
            out,
            num,
            width,
            SPLITS=len(outputs),
            CHOSEN=e.chosen,
            SHARED=0 if shared is None else shared.splits,
            SHARED_BIAS=shared is not None and shared.bias is not None,
            GATES=0 if gates is None else gates.splits,
            BLOCK=block,
            **ops.launch,
        )
        return PartialSums(out, None)

    def choose(self, x: Tensor) -> _Choice:
        """Choose the experts of each row, and group the rows by expert. x [T, H]: the rows that the router reads."""
        ops, e, num, device = self.ops, self.spec, len(x), x.device
        scores = ops.product(x.contiguous(), *self.router.parts[0])
        num_pairs, rows = num * e.chosen, _rows(num * e.chosen, e.num)
        is_alone = num == 1
        num_tiles = e.chosen if is_alone else min(num_pairs, num_pairs // rows + min(e.num, num_pairs))

        def ints(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=device)

        ids = ints(num, e.chosen)
        shares = torch.empty(num, e.chosen, dtype=torch.float32, device=device)
        order, tiles = ints(max(e.chosen, e.num) * num), ints(num_tiles, 3)
        counts, live = self.expert_counts.counts[self.layer], self.expert_counts.live
        ops.expert_kernels.routed[(num,)](
            scores.sums,
            scores.sums if scores.bias is None else scores.bias,
            scores.sums if self.scales is None else self.scales,
            ids if live is None else live,
            ids,
            shares,
            order,
            tiles,
            counts,
            num,
            e.num,
            float(e.score_scale),
            float(e.scale),
            SPLITS=scores.splits,
            BIAS=scores.bias is not None,
            SCORE=e.score,
            NORMALISE=e.normalise,
            SCALED=self.scales is not None,
            LIVE=live is not None,
            CHOSEN=e.chosen,
            CHOICES=_power(e.chosen),
            ALONE=is_alone,
            BLOCK=_power(e.num),
            num_warps=1 if e.num <= 128 else 4,
            **ops.launch,
        )
        if not is_alone:
            block = min(BLOCK_PAIRS, max(16, _power(num_pairs)))
            ops.expert_kernels.grouped[(e.num,)](
                ids, order, tiles, counts, num, num_pairs, ROWS=rows, BLOCK=block, num_warps=4, **ops.launch
            )
        return _Choice(ids, shares, order, tiles, counts, num_tiles, rows)

    def _product(self, x: Tensor, matrices: _Matrices, choice: _Choice, each: int) -> Tensor:
        """Multiply each pair by its expert's matrix -> [splits, pairs, O]. each: the number of pairs per row of x."""
        ops, num_pairs, biases = self.ops, choice.num_pairs, matrices.biases
        num_out, num_in, first = matrices.num_out, matrices.num_in, matrices.first
        cut = matrices.cut
        out = torch.empty(cut.splits, num_pairs, num_out, dtype=torch.float32, device=x.device)
        ends = (x if biases is None else biases, choice.order, choice.tiles, choice.counts, out, num_pairs)
        shared: dict[str, Any] = {
            "EACH": each,
            "ROWS": choice.rows,
            "BIAS": biases is not None,
            "PRECISION": _precision(x.dtype),
            "num_warps": cut.warps,
            **ops.launch,
        }
        if matrices.is_packed:
            ops.expert_kernels.product_of_experts_codes[(choice.num_tiles, -(-num_out // TILE), cut.splits)](
                x,
                matrices.addresses,
                *_tensors(first),
                *ends,
                num_out,
                num_in,
                cut.steps,
                cut.part,
                x.stride(0),
                **ops.code_constants(first),
                STAGES=cut.stages,
                num_stages=cut.stages,
                **shared,
            )
            return out
        outs = max(cut.outs, 64) if choice.rows == ROWS[-1] else cut.outs
        ops.expert_kernels.product_of_experts[(choice.num_tiles, -(-num_out // outs), cut.splits)](
            x,
            matrices.addresses,
            *ends,
            num_out,
            num_in,
            x.stride(0),
            first.stride(0),
            OUTS=outs,
            INS=cut.ins,
            PART=cut.part,
            EVEN=cut.part * cut.splits == num_in and num_out % outs == 0,
            num_stages=ops.stages(cut.stages, (choice.rows + outs) * cut.ins * x.itemsize),
            **shared,
        )
        return out


def _rows(num_pairs: int, num_experts: int) -> int:
    """Return the number of rows of a tile: about the average number of rows for which an expert is chosen.

    The number does not change any bits; see CudaOps.cut.
    """
    return next((rows for rows in ROWS if num_pairs <= rows * num_experts), ROWS[-1])


def _whole(product: Any) -> tuple[Any, Tensor | None]:
    """Return the matrices of a product as one matrix, and their biases as one vector; None = there are no biases."""
    if product.joined is not None or len(product.parts) == 1:
        return product.joined or product.parts[0]  # type: ignore[no-any-return]
    biases = [bias for _, bias in product.parts if bias is not None]
    return torch.cat([weight for weight, _ in product.parts]), torch.cat(biases) if biases else None


def _mlp(ops: CudaOps, mlp: TorchMlp, y: Tensor, dtype: torch.dtype) -> PartialSums:
    """Compute a feed-forward part on rows y [T, H] -> its partial sums [splits, T, H]."""
    inner = ops.product(y, *_whole(mlp.up))
    return ops.product(ops.inner(mlp.spec.act, mlp.spec.gated, inner, dtype), *mlp.down.parts[0])


def on_device(ops: CudaOps, blocks: Seq[TorchBlock], dtype: torch.dtype) -> ExpertCounts | None:
    """Make the mixtures of experts of all blocks choose their experts on the device.

    Returns the ExpertCounts that the mixtures share, or None if no block has experts.
    """
    mixtures = [(block, block.experts) for block in blocks if block.experts is not None]
    if not mixtures:
        return None
    counts = ExpertCounts(len(mixtures), mixtures[0][1].router.parts[0][0].device)
    for layer, (block, experts) in enumerate(mixtures):
        block.experts = CudaExperts(ops, experts, dtype, counts, layer)
    return counts
