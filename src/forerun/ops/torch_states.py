"""Recurrent layers in torch: the same recurrence in the same order for prompts, decoding, drafts and trees.

kv/states.py says what a pass reads and writes. Every token is one step of the recurrence in every kind of pass, so a
state has the same bits however its tokens were divided into passes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.blocks import Recurrence, recurrence_name
from forerun.kv.pool import StatePool
from forerun.kv.states import NOWHERE, StateRun
from forerun.ops.reference import Gated, ReferenceOps
from forerun.ops.torch_parts import Normed, Parts
from forerun.types import RaggedBatch

LENGTH_EPS = 1e-6  # added to the squared lengths of q and k, as in published code


@dataclass(frozen=True)
class _Tokens:
    """The tokens over which a run's recurrence steps: tokens kept after the run's first state, then the run's new ones.

    Kept tokens are committed or pending. inputs [conv - 1 + tokens, width]: the last inputs before all these tokens,
    which are stored with the state, then the tokens' inputs. gates: [tokens, gates]. first_own: the index of the run's
    first new token. parents: see ReferenceOps.convolved.
    """

    inputs: Tensor
    gates: Tensor
    first_own: int
    parents: Seq[int]


class TorchRecurrence:
    """The recurrent part of one block."""

    def __init__(self, r: Recurrence, parts: Parts, normed: Normed | None, at: str) -> None:
        self.spec, name_prefix = r, at + recurrence_name(r)
        self.norm = normed
        self.o = parts.product(f"{name_prefix}out_proj")
        if r.kind == "short_conv":
            self.input = parts.product(f"{name_prefix}in_proj")
            self.weight = parts.vector(f"{name_prefix}conv.weight")
            self.bias = parts.vector(f"{name_prefix}conv.bias") if r.biases else None
            return
        self.input = parts.product(f"{name_prefix}in_proj_qkv", f"{name_prefix}in_proj_z")
        self.gates = parts.product(f"{name_prefix}in_proj_b", f"{name_prefix}in_proj_a")
        self.weight = parts.vector(f"{name_prefix}conv1d.weight")
        self.bias = None
        self.dt_bias = parts.weights[f"{name_prefix}dt_bias.weight"].float()
        self._decay = parts.weights[f"{name_prefix}A_log.weight"].float()

    @property
    def decay(self) -> Tensor:
        """The factor [heads] of the softplus in g. It is computed anew for each pass because it may be trained."""
        return self._decay if self.spec.decay == "negative" else -self._decay.exp()

    def run(
        self, ops: ReferenceOps, y: Tensor, pool: StatePool | None, runs: Seq[StateRun], batch: RaggedBatch
    ) -> Tensor:
        """Return the output of the recurrence [T, H]. y: the rows that the projections read."""
        if self.spec.kind == "short_conv":
            b, c, x = self.input.apply(ops, y)[0].chunk(3, -1)
            inputs = b * x
            gates = y.new_empty(len(y), 0, dtype=torch.float32)
        else:
            inputs, z = self.input.apply(ops, y)
            gates = torch.cat(list(self.gates.apply(ops, y)), -1).float()
        outs = list[Tensor]()
        for b_, run in enumerate(runs):
            rows = slice(batch.run(b_).start, batch.run(b_).stop)
            tokens = self._tokens(pool, run, inputs[rows], gates[rows])
            outs.append(
                self._convolved(ops, tokens, run, pool)
                if self.spec.kind == "short_conv"
                else self._read(ops, tokens, run, pool)
            )
        if self.spec.kind == "short_conv":
            return self.o.apply(ops, c * (torch.cat(outs) if outs else inputs))[0]
        out = torch.cat(outs) if outs else gates.new_empty(0, self.spec.value_heads, self.spec.value_dim)
        heads = out.to(y.dtype) if self.norm is None else self.norm.apply(ops, out.to(y.dtype))
        opened = ops.activated("silu", z.float()).view(heads.shape)
        return self.o.apply(ops, (heads * opened).to(y.dtype).flatten(1))[0]

    def _tokens(self, pool: StatePool | None, run: StateRun, inputs: Tensor, gates: Tensor) -> _Tokens:
        """Store a run's inputs in the pool, and return all tokens over which the run's recurrence steps."""
        conv, num = self.spec.conv, len(inputs)
        history = inputs.new_zeros(conv - 1, inputs.shape[1])
        behind = [*run.before, *run.pending]
        if pool is not None:
            inputs = inputs.to(pool.inputs.dtype)
            kept = [i for i, row in enumerate(run.rows) if row != NOWHERE]
            if kept:
                places = [run.rows[i] for i in kept]
                kept_range = slice(kept[0], kept[-1] + 1)
                pool.inputs[places], pool.gates[places] = inputs[kept_range], gates[kept_range]
            if run.first != NOWHERE:
                history = pool.history[run.first].to(history.dtype)
            inputs = torch.cat((pool.inputs[behind], inputs)).to(history.dtype)
            gates = torch.cat((pool.gates[behind], gates))
        parents: Seq[int] = range(-1, len(behind) + num - 1)
        if run.paths:
            parents = self._tree(run)
        return _Tokens(torch.cat((history, inputs)), gates, len(behind), parents)

    @staticmethod
    def _tree(run: StateRun) -> list[int]:
        """Return the index of each token's parent, for a run that is a tree; see _Tokens."""
        num, last = len(run.before), len(run.before) - 1
        parents = list(range(-1, last)) + [last] * (len(run.pending) + len(run.rows))
        for i, path in enumerate(run.paths):
            nodes = [num + node for node in (*path, len(run.pending) + i)]
            for parent, child in zip([last, *nodes], nodes, strict=False):
                parents[child] = parent
        return parents

    def _convolved(self, ops: ReferenceOps, tokens: _Tokens, run: StateRun, pool: StatePool | None) -> Tensor:
        """Return the short convolution of a run's rows [n, H]. Also writes the run's new states into the pool."""
        for num, state in run.saves:
            assert pool is not None
            pool.history[state] = tokens.inputs[num : num + self.spec.conv - 1].to(pool.history.dtype)
        return ops.convolved(tokens.inputs, self.weight, self.bias, tokens.parents)[tokens.first_own :]

    def _read(self, ops: ReferenceOps, tokens: _Tokens, run: StateRun, pool: StatePool | None) -> Tensor:
        """Return the outputs of a run's rows, float32 [n, heads, value_dim].

        Also writes the run's new states into the pool.
        """
        r, saves = self.spec, {} if pool is None else dict(run.saves)
        state = tokens.gates.new_zeros(r.value_heads, r.key_dim, r.value_dim)
        if pool is not None and run.first != NOWHERE:
            state = pool.states[run.first]
        gated = self._gated(ops, tokens)
        outs, left = ops.delta_rule(gated, state, tokens.parents, tokens.first_own, [num - 1 for num in saves])
        for num, place in saves.items():
            assert pool is not None
            pool.states[place] = left[num - 1]
            pool.history[place] = tokens.inputs[num : num + r.conv - 1].to(pool.history.dtype)
        return outs

    def _gated(self, ops: ReferenceOps, tokens: _Tokens) -> Gated:
        """Compute the operands of the delta rule for each token."""
        r = self.spec
        convolved = ops.convolved(tokens.inputs, self.weight, self.bias, tokens.parents)
        sizes = [r.key_heads * r.key_dim] * 2 + [r.value_heads * r.value_dim]
        q, k, v = torch.split_with_sizes(ops.activated("silu", convolved).float(), sizes, -1)
        times = r.value_heads // r.key_heads
        q, k = (ops.of_length_one(x.view(len(x), r.key_heads, r.key_dim), LENGTH_EPS) for x in (q, k))
        q, k = (x.repeat_interleave(times, 1) if r.grouped else x.repeat(1, times, 1) for x in (q, k))
        q = q / r.key_dim**0.5
        v = v.view(len(v), r.value_heads, r.value_dim)
        return Gated(q, k, v, *ops.gates_of(tokens.gates, self.dt_bias, self.decay))
