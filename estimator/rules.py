"""Which strategies are legal on a model, a system and a workload: one table of rules, each with its law and remedy.

A batch gets a code per row (0: legal, else 1 + index of the first rule that fails); a scalar gets the same rule as a
message. Rules never divide by what they have not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from estimator.chip_rules import compiled, formats, host_known, launches, multiplies, offered
from estimator.layer_rules import groups_split, keys_gathered, keys_read, layers_of, scans_spread, split_groups
from estimator.layers import Mlp
from estimator.layout import even_layers
from estimator.model import ModelSpec
from estimator.schedule_rules import paired, schedule_refusal, schedule_runs
from estimator.strategy import (
    ContextParallel,
    CudaGraph,
    LayoutRule,
    Offload,
    Optimizer,
    Overlap,
    RankOrder,
    RecomputeKind,
    Schedule,
    Strategy,
)
from estimator.workload import Workload
from hardware.system import SystemSpec

__all__ = ["RULES", "Case", "Rule", "check", "explain"]


@dataclass(frozen=True, slots=True)
class Case:
    """What rules look at: sizes as float arrays `[N]` under their Strategy names, and what follows from them."""

    model: ModelSpec
    strategy: Strategy
    system: SystemSpec
    workload: Workload
    sizes: dict[str, np.ndarray]

    @classmethod
    def of(cls, model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload) -> Case:
        """Broadcast the sizes of a strategy to one length; derive dp and m, rounded down where they do not divide."""
        values = {name: np.atleast_1d(np.asarray(v, dtype=np.float64)) for name, v in strategy.sizes().items()}
        n = strategy.num_rows
        sizes = {name: v if len(v) == n else np.broadcast_to(v, (n,)) for name, v in values.items()}
        inner = np.maximum(sizes["tp"] * sizes["cp"] * sizes["pp"], 1)
        sizes["dp"] = np.maximum(system.num_chips // inner, 1)
        per_step = np.maximum(sizes["dp"] * sizes["micro_batch"], 1)
        sizes["num_micro_batches"] = np.maximum(workload.global_batch // per_step, 1)
        sizes["edp"] = np.maximum(
            sizes["tp"] * sizes["cp"] * sizes["dp"] // np.maximum(sizes["etp"] * sizes["ep"], 1), 1
        )
        copies = 2.0 if strategy.schedule is Schedule.DUALPIPE else 1.0  # stages that hold the same weights
        sizes["copies"] = np.full(sizes["dp"].shape, copies)
        return cls(model, strategy, system, workload, sizes)

    def take(self, rows: np.ndarray) -> Case:
        """Some of the rows."""
        return Case(self.model, self.strategy, self.system, self.workload, {k: v[rows] for k, v in self.sizes.items()})

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self.sizes[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, slots=True)
class Rule:
    """`ok` gives a mask [N]; `law` says what must hold, `remedy` what to try; both may name sizes in braces."""

    name: str
    ok: Callable[[Case], np.ndarray]
    law: str
    remedy: str


def _divides(number: float, by: np.ndarray) -> np.ndarray:
    return np.asarray(number % np.maximum(by, 1) == 0)


def _true(c: Case) -> np.ndarray:
    return np.ones(c.tp.shape, dtype=bool)


def _whole_sizes(c: Case) -> np.ndarray:
    names = ("tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch", "dp_replicate")
    return np.logical_and.reduce([(c.sizes[n] >= 1) & (c.sizes[n] % 1 == 0) for n in names])


def _flags(c: Case) -> np.ndarray:
    flags = [c.sizes[f"overlap_{f.name}"] for f in fields(Overlap)]
    good = [(f == 0) | (f == 1) for f in (*flags, c.reshard_after_forward)]
    shares = [c.sizes[f"offload_{f.name}"] for f in fields(Offload)]
    good += [(share >= 0) & (share <= 1) for share in shares]
    good += [(c.prefetch_blocks >= 0) & (c.prefetch_blocks % 1 == 0)]
    stage = c.zero_stage
    chunks = c.strategy.tp_chunks
    whole = min(chunks.attention_in, chunks.attention_out, chunks.mlp_in, chunks.mlp_out) >= 1
    buckets = (c.bucket_bytes >= 0) & ((c.strategy.expert_bucket_bytes or 0) >= 0)
    whole = whole and c.strategy.redundant_experts >= 0 and c.strategy.interleave_group >= 0
    return np.logical_and.reduce([*good, (stage >= 0) & (stage <= 3) & (stage % 1 == 0), buckets & whole])


def _kv_heads(c: Case) -> np.ndarray:
    heads = c.model.num_kv_heads
    return _divides(heads, c.tp) | (c.tp % heads == 0)


def _widths(model: ModelSpec) -> tuple[int, ...]:
    """Intermediate sizes that tp splits: those of dense layers and of shared experts."""
    dense = (model.ffn,) if any(layer.mlp is Mlp.DENSE for layer in layers_of(model)) else ()
    return (*dense, model.moe.shared_ffn) if model.moe and model.moe.shared_ffn else dense


def _ffn(c: Case) -> np.ndarray:
    return np.logical_and.reduce([_true(c), *(_divides(width, c.tp) for width in _widths(c.model))])


def _experts(c: Case) -> np.ndarray:
    if c.model.moe is None:
        return (c.ep == 1) & (c.etp == 1)
    held = c.model.moe.num_experts + c.strategy.redundant_experts * (c.ep > 1)
    return np.asarray(held % np.maximum(c.ep, 1) == 0) & _divides(c.model.moe.ffn, c.etp)


def _redundant(c: Case) -> np.ndarray:
    moe = c.model.moe
    return _true(c) & (moe is None or c.strategy.redundant_experts <= moe.num_experts)


def _expert_world(c: Case) -> np.ndarray:
    return np.asarray((c.tp * c.cp * c.dp) % np.maximum(c.ep * c.etp, 1) == 0)


def _experts_inside(c: Case) -> np.ndarray:
    if c.model.moe is None or c.strategy.rank_order is RankOrder.TP_CP_DP_PP:
        return _true(c)
    return np.asarray((c.tp * c.cp) % np.maximum(c.ep * c.etp, 1) == 0)


def _moe_sequence_parallel(c: Case) -> np.ndarray:
    if c.model.moe is None or c.strategy.sequence_parallel:
        return _true(c)
    return np.asarray(c.tp == 1)


def _sequence(c: Case) -> np.ndarray:
    seq, cp = c.workload.seq, c.cp
    # A causal mask makes later tokens dearer: ranks take one slice from each end (Llama 3, arXiv:2407.21783, section
    # 3.3.2). Ulysses splits heads instead.
    halves = 1 if c.strategy.context_parallel is ContextParallel.ULYSSES else 2
    split = np.where(cp > 1, halves * cp, 1)
    if c.strategy.sequence_parallel:
        split = split * c.tp
    return _divides(seq, split)


def _ulysses(c: Case) -> np.ndarray:
    if c.strategy.context_parallel is not ContextParallel.ULYSSES:
        return _true(c)
    split = _divides(c.model.num_heads, c.tp * c.cp) & _divides(c.model.num_kv_heads, c.tp * c.cp)
    return (c.cp == 1) | split


def _replicas(c: Case) -> np.ndarray:
    return np.asarray((c.dp % np.maximum(c.dp_replicate, 1) == 0) & (c.edp % np.maximum(c.dp_replicate, 1) == 0))


def _optimizer(c: Case) -> np.ndarray:
    return (c.offload_states == 0) | (c.strategy.optimizer is not Optimizer.MUON)


def _layers(c: Case) -> np.ndarray:
    chunks = c.pp * c.vpp
    if isinstance(c.strategy.layout, tuple):
        layout = c.strategy.layout
        good = sum(layout) == c.model.num_layers and min(layout) >= 0 and min(layout[1:-1], default=1) >= 1
        return (chunks == len(layout)) & good
    # Two chunks may hold no layer: the first has the embedding, the last the head (Llama 3, arXiv:2407.21783, section
    # 3.3.2: 126 layers on 128 chunks).
    return np.asarray(chunks <= c.model.num_layers + 2)


def _chunk_layers(c: Case, num_chunks: int) -> tuple[int, ...]:
    layout = c.strategy.layout
    return layout if isinstance(layout, tuple) else even_layers(c.model.num_layers, num_chunks)


def _auto_layout(c: Case) -> np.ndarray:
    if c.strategy.layout is not LayoutRule.AUTO:
        return _true(c)
    return (c.pp > 1) & (c.strategy.recompute_per_chunk is None)


def _per_chunk(c: Case) -> np.ndarray:
    chosen = c.strategy.recompute_per_chunk
    if chosen is None:
        return _true(c)
    layers = _chunk_layers(c, max(len(chosen), 1))
    good = len(chosen) == len(layers) and any(chosen) and all(0 <= r <= n for r, n in zip(chosen, layers, strict=True))
    return (c.pp * c.vpp == len(chosen)) & good


def _recompute(c: Case) -> np.ndarray:
    block, per_chunk = c.strategy.recompute.kind is RecomputeKind.BLOCK, c.strategy.recompute_per_chunk is not None
    n = c.recompute_layers
    least = 0 if per_chunk else 1  # where each chunk has its own number, the common one is ignored
    return (n >= least) & (n % 1 == 0) if block else (n == 0) & (not per_chunk)


def _overlap_ep(c: Case) -> np.ndarray:
    effect = (c.overlap_ep > 0) & (c.ep > 1)
    return ~effect | ((paired(c.strategy.schedule) | (c.pp == 1)) & (c.num_micro_batches >= 2))


def _overlap_tp(c: Case) -> np.ndarray:
    return (c.overlap_tp == 0) | (c.tp == 1) | c.strategy.sequence_parallel


def _shared_experts(c: Case) -> np.ndarray:
    both = (c.overlap_ep > 0) & (c.ep > 1) & c.model.has_shared_experts
    return ~both | (not c.strategy.shared_expert_overlap) if both.any() else _true(c)


def _cuda_graph(c: Case) -> np.ndarray:
    is_static = c.model.moe is None or bool(c.model.moe.capacity_factor)
    return _true(c) & (is_static or c.strategy.cuda_graph is not CudaGraph.FULL)


def _engine(c: Case) -> np.ndarray:
    return _true(c) & multiplies(c.strategy, c.system)


def _launches(c: Case) -> np.ndarray:
    return _true(c) & launches(c.strategy, c.system)


def _segments(c: Case) -> np.ndarray:
    """Whether each stage lies on one segment of the system, and what chips of several kinds are priced for."""
    parts = c.system.parts
    if len(parts) == 1:
        return _true(c)
    whole = np.logical_and.reduce([c.pp * part.num_chips % c.system.num_chips == 0 for part in parts])
    shares = [c.sizes[f"offload_{f.name}"] for f in fields(Offload)]
    here = np.logical_and.reduce([share == 0 for share in shares])
    if c.strategy.layout is LayoutRule.AUTO:
        here = here & (c.vpp == 1)
    return whole & here & (c.copies == 1) & (c.strategy.rank_order is RankOrder.TP_CP_DP_PP)


RULES: tuple[Rule, ...] = (
    Rule("sizes", _whole_sizes,
         "tp, cp, pp, ep, etp, vpp, micro_batch and dp_replicate must be whole numbers of at least 1",
         "use 1 for what is off"),
    Rule("options", _flags, "overlap flags and reshard_after_forward are 0 or 1, zero_stage 0 to 3, shares of offload "
         "from 0 to 1, tp_chunks at least 1, bucket_bytes, expert_bucket_bytes, prefetch_blocks, redundant_experts and "
         "interleave_group at least 0",
         "got overlap tp {overlap_tp}, cp {overlap_cp}, ep {overlap_ep}, pp {overlap_pp}, dp {overlap_dp}, zero_stage "
         "{zero_stage}, reshard_after_forward {reshard_after_forward}, prefetch_blocks {prefetch_blocks}, offload "
         "activations {offload_activations}, parameters {offload_parameters}, gradients {offload_gradients}, states "
         "{offload_states}, tp_chunks {tp_chunks}"),
    Rule("engine", _engine, "{precision} needs a matrix engine for {formats}; {offered}",
         "choose another precision or chip"),
    Rule("cuda_graph", _cuda_graph, "a captured iteration needs shapes that do not depend on where tokens are routed",
         "use cuda_graph: layer, which leaves what experts do outside, or a model with a capacity_factor"),
    Rule("launches", _launches, "cuda_graph captures launches, but a step of {compiled} is one compiled program, which "
         "has none", "set cuda_graph: none"),
    Rule("world", lambda c: _divides(c.system.num_chips, c.tp * c.cp * c.pp),
         "num_chips ({num_chips}) must be divisible by tp ({tp}) * cp ({cp}) * pp ({pp})",
         "choose degrees whose product divides it"),
    Rule("segments", _segments, "stages lie on one segment of the system each: pp ({pp}) times the chips of each "
         "segment ({segments}) must be divisible by {num_chips}, in rank order tp-cp-dp-pp, with one copy of each "
         "stage, without offload, and layout auto with vpp 1",
         "choose pp in proportion, another schedule or rank order, or one cluster"),
    Rule("heads", lambda c: _divides(c.model.num_heads, c.tp), "heads ({num_heads}) must be divisible by tp ({tp})",
         "choose a divisor of the heads"),
    Rule("kv_heads", _kv_heads, "kv heads ({num_kv_heads}) and tp ({tp}) must divide one another",
         "choose tp among divisors or multiples of the kv heads"),
    Rule("mixer_groups", lambda c: groups_split(c.model, c.tp), "{groups} must be divisible by tp ({tp})",
         "choose a divisor"),
    Rule("scan_context", lambda c: scans_spread(c.model, c.tp, c.cp),
         "heads of mamba and key heads of linear attention must be divisible by tp * cp ({tp} * {cp}): context "
         "parallelism spreads them", "lower cp or tp"),
    Rule("sparse_context", lambda c: keys_gathered(c.model, c.strategy, c.cp, c.workload.seq),
         "a layer that chooses or compresses keys needs cp ({cp}) 1 or "
         "context_parallel all-gather, for a ring does not bring all keys at once, and whole entries of seq ({seq}) on "
         "a rank", "use context_parallel: all-gather, and a cp that divides seq / compression"),
    Rule("sparse_kernel", lambda c: keys_read(c.model, c.strategy, c.tp),
         "a layer that chooses or compresses keys needs flash_attention in fusion: no "
         "other kernel of it is modelled", "add flash_attention to fusion"),
    Rule("ffn", _ffn, "ffn ({ffn}) of dense layers and shared experts must be divisible by tp ({tp})",
         "choose a divisor"),
    Rule("experts", _experts, "experts ({num_experts} and {redundant_experts} copies) must be "
         "divisible by ep ({ep}) and expert ffn by etp ({etp})",
         "choose divisors; a dense model has ep = etp = 1"),
    Rule("redundant_experts", _redundant,
         "copies of experts ({redundant_experts}) must be at most as many as the experts ({num_experts})",
         "lower redundant_experts"),
    Rule("expert_world", _expert_world,
         "tp * cp * dp ({tp} * {cp} * {dp}) must be divisible by ep * etp ({ep} * {etp})",
         "lower ep or etp, or pp to raise dp"),
    Rule("rank_order", _experts_inside,
         "ranks in the order tp-cp-pp-dp keep experts inside tp * cp: {tp} * {cp} must be divisible "
         "by ep * etp ({ep} * {etp})", "lower ep or etp, or use rank_order: tp-cp-dp-pp"),
    Rule("moe_sequence_parallel", _moe_sequence_parallel, "experts with tp ({tp}) > 1 need sequence_parallel",
         "set sequence_parallel: true"),
    Rule("sequence", _sequence, "seq ({seq}) must be divisible by cp ({cp}) (twice that without ulysses) and, under "
         "sequence parallelism, by tp ({tp})", "lower cp or tp"),
    Rule("ulysses", _ulysses, "heads and kv heads must be divisible by tp * cp ({tp} * {cp}) for ulysses",
         "lower cp, or use context_parallel: ring"),
    Rule("batch", lambda c: _divides(c.workload.global_batch, c.dp * c.micro_batch),
         "global_batch ({global_batch}) must be divisible by dp ({dp}) * micro_batch ({micro_batch})",
         "change micro_batch or the degrees that leave dp"),
    Rule("dp_replicate", _replicas, "dp ({dp}) and the ranks that share an expert ({edp}) must be divisible by "
         "dp_replicate ({dp_replicate})", "lower dp_replicate, or ep"),
    Rule("optimizer", _optimizer, "{optimizer} needs momentum on the chip that orthogonalises it, but offload of "
         "states is {offload_states}", "set offload states to 0, or optimizer: adam"),
    Rule("offload", lambda c: host_known(c.sizes, c.system),
         "offload needs a chip whose link to the host and whose host's memory are known, and of "
         "{chip} they are not", "set offload to 0, or give the chip host_bytes_per_s, host_memory_bytes and "
         "host_memory_bytes_per_s"),
    Rule("layers", _layers, "layers ({num_layers}) must fill pp * vpp = {pp} * {vpp} chunks, but for the first and the "
         "last{layout}", "lower pp or vpp, or correct the layout"),
    Rule("auto_layout", _auto_layout, "layout auto balances the stages of a pipeline (pp {pp}) that recompute alike",
         "leave layout out where pp is 1, and recompute_per_chunk where layers are balanced"),
    Rule("schedule", lambda c: schedule_runs(c.strategy, c.pp, c.vpp, c.num_micro_batches), "{schedule_law}",
         "{schedule_remedy}"),
    Rule("recompute_per_chunk", _per_chunk, "recompute_per_chunk ({recompute_per_chunk}) must name each of pp * vpp = "
         "{pp} * {vpp} chunks, from 0 to its layers ({chunk_layers}) and not all of them 0",
         "correct it; write all zero as recompute: none"),
    Rule("recompute", _recompute, "recompute_layers ({recompute_layers}) must be at least 1 with block recompute and 0 "
         "with any other, which leaves recompute_per_chunk out as well",
         "set recompute: block, or leave recompute_layers and recompute_per_chunk out"),
    Rule("overlap_tp", _overlap_tp, "overlap of tp needs sequence_parallel", "set sequence_parallel: true"),
    Rule("overlap_ep", _overlap_ep, "overlap of ep needs two micro-batches side by side: pp 1, interleaved, dualpipe "
         "or dualpipe-v",
         "change the schedule or set overlap ep to 0"),
    # Megatron-Core refuses both as well: --overlap-moe-expert-parallel-comm and --moe-shared-expert-overlap.
    Rule("shared_expert_overlap", _shared_experts, "all-to-all hides behind another micro-batch (overlap ep) or behind "
         "its own shared experts (shared_expert_overlap), not behind both",
         "set shared_expert_overlap: false or overlap ep to 0"),
)  # fmt: skip


def check(case: Case) -> np.ndarray:
    """Code per row [N]: 0 legal, else 1 + index into RULES of the first rule that fails."""
    code = np.zeros(case.tp.shape, dtype=np.int64)
    alive = np.arange(len(code))  # rows that no rule has rejected; the others are left out of later rules
    for i, rule in enumerate(RULES):
        ok = np.broadcast_to(rule.ok(case), alive.shape)
        if not ok.all():
            code[alive[~ok]] = i + 1
            alive = alive[ok]
            case = case.take(ok)
    return code


def _joined(numbers: tuple[int, ...]) -> str:
    return "+".join(map(str, numbers))


def _told(layout: tuple[int, ...] | LayoutRule | None) -> str:
    """What a listed layout says."""
    if not isinstance(layout, tuple):
        return ""
    return f"; the layout has {len(layout)} chunks with {sum(layout)} layers in all"


def explain(case: Case, code: int, row: int = 0) -> str:
    """Law, offence and remedy of a failed rule for one row."""
    rule = RULES[code - 1]
    moe, s = case.model.moe, case.strategy
    law, remedy = schedule_refusal(s, *(int(sizes[row]) for sizes in (case.pp, case.vpp, case.num_micro_batches)))
    chunk_layers = _chunk_layers(case, max(int(case.pp[row] * case.vpp[row]), 1))
    names: dict[str, object] = {name: f"{values[row]:g}" for name, values in case.sizes.items()}
    names |= {
        "precision": s.precision, "formats": " and ".join(d.value for d in formats(s)),
        "offered": offered(case.system), "compiled": compiled(case.system),
        "segments": " + ".join(str(part.num_chips) for part in case.system.parts),
        "num_chips": case.system.num_chips, "num_heads": case.model.num_heads, "num_kv_heads": case.model.num_kv_heads,
        "groups": " and ".join(f"{name} ({number})" for name, number in split_groups(case.model).items()),
        "ffn": " and ".join(map(str, _widths(case.model))), "num_experts": moe.num_experts if moe else 0,
        "redundant_experts": s.redundant_experts,
        "seq": case.workload.seq, "chip": case.system.chip.name,
        "global_batch": case.workload.global_batch, "num_layers": case.model.num_layers,
        "optimizer": s.optimizer.value, "tp_chunks": s.tp_chunks,
        "chunk_layers": _joined(chunk_layers),
        "recompute_per_chunk": _joined(s.recompute_per_chunk or ()), "layout": _told(s.layout),
        "schedule_law": law, "schedule_remedy": remedy,
    }  # fmt: skip
    return f"{rule.name}: {rule.law.format(**names)}; {rule.remedy.format(**names)}"
