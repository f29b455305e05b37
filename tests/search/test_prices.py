"""Rows of variants put together from rows that differ in one choice are those priced by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from estimator.cost.table import CHANGED_BY, Again, Base
from estimator.tables import ROW_FLAGS, ROW_SIZES, TableBuilder
from search.idle import idle_variants
from search.prices import with_rows_of
from search.space import load_space
from search.structures import enumerate_space
from search.worlds import SIZES, VARIANT_AXES

OPEN = {
    "precision": ["bf16", "fp8_block", "nvfp4"],
    "fusion": [["flash_attention", "fused_norm", "fused_activation", "fused_loss"], ["flash_attention"], []],
    "optimizer": ["adam", "adam_8bit", "muon", "sgd"],
    "cuda_graph": ["none", "attention", "layer", "full"],
    "shared_expert_overlap": [False, True],
    "tp_chunks": [1, 4, {"attention_in": 2, "attention_out": 1, "mlp_in": 8, "mlp_out": 4}],
    "overlap": {"cp": [0, 1], "tp": [0, 1]},
    "expert_bucket_bytes": [None, 400e6],
    "recompute": ["none", "full", "selective", "layernorm", "moe", "block"],
    "recompute_layers": [1],
}
SPACES = {
    "deepseek_v3": ("dgx_b200", {"tp": [1, 4], "cp": [1, 2], "pp": [1], "ep": [1, 8], "micro_batch": [1]}),
    "llama3_8b": ("dgx_b200", {"tp": [1, 2], "cp": [1, 2], "pp": [1], "ep": [1], "micro_batch": [2]}),
    "nemotron_h_56b": ("dgx_b200", {"tp": [1, 2], "cp": [1, 2], "pp": [1], "ep": [1], "micro_batch": [1]}),
    "gpt_oss_20b": ("dgx_b200", {"tp": [1, 2], "cp": [1, 2], "pp": [1], "ep": [1, 4], "micro_batch": [1]}),
}


def space_of(model, tmp_path):
    cluster, sizes = SPACES[model]
    file = tmp_path / "space.yaml"
    strategy = "\n".join(f"  {name}: {value!r}".replace("None", "null") for name, value in {**sizes, **OPEN}.items())
    file.write_text(
        f"name: s\nmodel: {model}\nsystem: {{cluster: {cluster}, num_chips: 64}}\n"
        f"workload: {{seq: 4096, global_batch: 256}}\nobjectives: [step_time_s, peak_memory_bytes]\n"
        f"strategy:\n{strategy}\n".replace("True", "true").replace("False", "false")
    )
    return load_space(file)


@pytest.mark.parametrize("model", SPACES)
def test_rows_put_together_are_those_of_every_variant_priced_by_itself(model, tmp_path):
    space = space_of(model, tmp_path)
    enumeration = enumerate_space(space)
    compared = 0
    for w, world in enumerate(enumeration.worlds):
        structures = enumeration.structures.take(np.flatnonzero(enumeration.structures.world == w))
        first = np.unique(structures.row, return_index=True)[1]
        sizes = {name: structures.sizes[first, SIZES.index(name)] for name in ROW_SIZES}
        idle = idle_variants(space.model, world.strategy, sizes)
        rng = np.random.default_rng(w)
        for v in rng.permutation(len(world.variants.ids))[:60]:
            strategy = world.variants.strategies[v]
            at = {name: int(world.variants.at[name][v]) for name in VARIANT_AXES if name in world.variants.at}
            mine = np.ones(len(first), dtype=bool)
            for name in CHANGED_BY:
                if at.get(name, 0) and name in idle:
                    mine &= ~idle[name]
            if not mine.any():
                continue
            tables, where = with_rows_of(world, int(v), structures.row[first[mine]])
            choices = world.choices.plain_recomputes
            builder = TableBuilder(space.model, world.system, space.workload, strategy, choices)
            rows = {name: values[mine] for name, values in sizes.items()}
            rows |= {flag: np.full(int(mine.sum()), float(strategy.sizes()[flag])) for flag in ROW_FLAGS}
            alone = builder.prices(rows)
            for column in Base:
                assert np.array_equal(tables.base[where][..., column], alone.base[..., column]), (strategy, column)
            for again in Again:
                assert np.array_equal(tables.again[where][:, :-1, :, again], alone.again[..., again]), (strategy, again)
            assert np.array_equal(tables.hop_bytes[where], alone.hop_bytes)
            assert np.array_equal(tables.buffer_bytes[where], alone.buffer_bytes)
            compared += int(mine.sum())
    assert compared > 20
