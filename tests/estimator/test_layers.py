"""Claims about layers: how a model file writes them, which cannot be, and the parameters that their parts hold."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from estimator.graph import BlockKind
from estimator.layers import LayerSpec, Mixer, Mlp, expand_layers
from estimator.model import ModelSpec, MoESpec, QKNorm
from estimator.model_io import model_from_mapping
from estimator.parts import CompressedSpec, HyperSpec, IndexerSpec, LinearAttentionSpec, MambaSpec, MLASpec

TINY = ModelSpec(name="tiny", num_layers=2, hidden=8, ffn=32, num_heads=4, num_kv_heads=2, head_dim=2, vocab=10)
MOE = MoESpec(num_experts=4, top_k=2, ffn=16, num_shared_experts=1, shared_ffn=16)
MAMBA = MambaSpec(num_heads=4, head_dim=3, state=5, groups=2)
LINEAR = LinearAttentionSpec(num_key_heads=2, num_value_heads=4, key_head_dim=3, value_head_dim=5)
INDEXER = IndexerSpec(num_heads=3, head_dim=4, top_k=7)
MLA = MLASpec(q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3)
COMPRESSED = CompressedSpec(q_lora_rank=6, o_groups=2, o_lora_rank=3, qk_rope_head_dim=1)
FIELDS = {"name": "tiny", "num_layers": 6, "hidden": 8, "ffn": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2,
          "vocab": 10}  # fmt: skip


def twice(layer: LayerSpec) -> dict[str, object]:
    return {"layers": (layer,) * 2}


# Each is 2 layers more of the part, less the attention (2 * (8*8 + 2*8*4 + 8*8)) or the MLP and its norm that go.
ATTENTION, NORM, MLP_HALF = 192, 8, 3 * 8 * 32


@pytest.mark.parametrize(
    ("change", "added"),
    [
        (twice(LayerSpec(window=3)), 0),
        (twice(LayerSpec(chunk=3, rope=False)), 0),
        ({"attention_sinks": True}, 2 * 4),
        ({"attention_gate": True}, 2 * 8 * 8),
        ({"parallel_block": True}, -2 * NORM),
        ({"qk_norm": QKNorm.FULL}, 2 * (4 + 2) * 2),
        ({"qk_norm": QKNorm.UNWEIGHTED}, 0),
        (twice(LayerSpec(mixer=Mixer.NONE)), -2 * (ATTENTION + NORM)),
        (twice(LayerSpec(mlp=Mlp.NONE)), -2 * (MLP_HALF + NORM)),
        # in: x and gate 24, B and C 20, steps 4; taps and bias of 32 channels; three numbers a head; norm; out
        (twice(LayerSpec(mixer=Mixer.MAMBA)) | {"mamba": MAMBA},
         2 * (8 * 48 + 32 * 5 + 3 * 4 + 12 + 12 * 8 - ATTENTION)),
        (twice(LayerSpec(mixer=Mixer.MAMBA)) | {"mamba": replace(MAMBA, conv_bias=False)},
         2 * (8 * 48 + 32 * 4 + 3 * 4 + 12 + 12 * 8 - ATTENTION)),
        # q 6, k 6, v 20, gate 20, two numbers for each of 4 heads; taps of 32 channels; decays; norm of a head; out
        (twice(LayerSpec(mixer=Mixer.LINEAR)) | {"linear": LINEAR},
         2 * (8 * 60 + 32 * 4 + 8 + 5 + 20 * 8 - ATTENTION)),
        ({"hyper": HyperSpec(streams=2)}, 2 * 2 * (8 * (16 + 1) + 3) + 2 * (16 + 1) + 1),
    ],
)  # fmt: skip
def test_each_part_adds_its_own_parameters(change, added):
    assert replace(TINY, **change).num_parameters() - TINY.num_parameters() == added


@pytest.mark.parametrize(
    ("change", "added"),
    [
        ({"router_bias": True}, 2 * 4),
        ({"shared_expert_gate": True}, 2 * 8),
        # experts work in 4 of 8 columns: half of each, and a way there and back
        ({"latent": 4}, 2 * (2 * 8 * 4 - 4 * 3 * 4 * 16)),
    ],
)
def test_each_feature_of_experts_adds_its_own_parameters(change, added):
    model = replace(TINY, moe=MOE)
    assert replace(model, moe=replace(MOE, **change)).num_parameters() - model.num_parameters() == added


def test_words_that_choose_experts_need_no_correction():
    model = replace(TINY, moe=replace(MOE, router_correction_bias=True), **twice(LayerSpec(mlp=Mlp.MOE)))
    hashed = replace(model, layers=(LayerSpec(mlp=Mlp.MOE, hash_routed=True), LayerSpec(mlp=Mlp.MOE)))
    assert model.num_parameters() - hashed.num_parameters() == 4
    assert (model.num_router_biases(), hashed.num_router_biases()) == (8, 4)


def test_an_indexer_adds_queries_of_the_latent_one_key_head_its_norm_and_weights():
    model = replace(TINY, num_kv_heads=4, mla=MLA)
    indexed = replace(model, indexer=INDEXER, **twice(LayerSpec(indexed=True)))
    assert indexed.num_parameters() - model.num_parameters() == 2 * (6 * 12 + 8 * 4 + 2 * 4 + 8 * 3)


def test_compressed_attention_counts_its_entries_by_layer():
    attention = 6 * (8 + 1 + 8) + 8 * 2 + 2 + 8 * 3 + 6 * 8
    layers = (LayerSpec(window=3), LayerSpec(window=3, compression=4))
    model = replace(TINY, num_kv_heads=1, compressed=COMPRESSED, layers=layers)
    entries = 2 * 8 * 2 + 4 * 2 + 2
    assert model.num_parameters() - TINY.num_parameters() == 2 * (attention - ATTENTION) + entries
    chosen = replace(model, indexer=INDEXER, layers=(layers[0], replace(layers[1], indexed=True)))
    more = (2 * 8 * 2 + 4 * 2) + (2 * 8 * 8 + 4 * 8 + 4) + 6 * 12 + 8 * 3  # twice as wide; the indexer's own; queries
    assert chosen.num_parameters() - model.num_parameters() == more


def test_mtp_runs_the_last_layer_or_the_one_it_is_given():
    layers = (LayerSpec(), LayerSpec(mixer=Mixer.NONE))
    model = replace(TINY, layers=layers, num_mtp_layers=1)
    assert model.mtp_layer_spec == layers[-1]
    other = replace(model, mtp_layer=LayerSpec())
    assert other.mtp_parameters - model.mtp_parameters == ATTENTION + NORM


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ([{"window": 8, "mlp": "moe"}, {"mlp": "moe"}], ["window8+moe", "moe"] * 3),
        ([{"repeat": 4}, {"mlp": "moe", "repeat": 2}], ["dense"] * 4 + ["moe"] * 2),
        ({"pattern": "M-*", "kinds": {"M": {"mixer": "mamba", "mlp": "none"}, "-": {"mixer": "none"},
                                      "*": {"mlp": "none"}}}, ["mamba", "mlp", "attention"] * 2),
    ],
)  # fmt: skip
def test_a_model_file_writes_a_pattern_that_repeats(written, names):
    assert [layer.name for layer in expand_layers(written, 6)] == names


def test_a_model_file_reads_layers_and_parts():
    written = FIELDS | {"num_layers": 2, "qk_norm": True, "layers": [{"mixer": "linear"}], "linear": {
        "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 3, "value_head_dim": 5}}  # fmt: skip
    expected = replace(TINY, qk_norm=QKNorm.HEAD, linear=LINEAR, **twice(LayerSpec(mixer=Mixer.LINEAR)))
    assert model_from_mapping(written) == expected
    assert model_from_mapping(FIELDS | {"num_layers": 2, "qk_norm": False, "layers": None}) == TINY


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{}] * 4, r"num_layers \(6\) must be a multiple of the layers listed \(4\)"),
        ([], r"num_layers \(6\) must be a multiple of the layers listed \(0\)"),
        ("MM", "layers must be a list of layers, or a pattern with its kinds, but got 'MM'"),
        ([3], "layers.0 must hold fields of a layer, but got 3"),
        ([{"windows": 3}], "layers.0.windows is not a key of a model; did you mean 'window'?"),
        ([{"window": -1}], "layers.0.window must be at least 0"),
        ([{"repeat": 0}], "layers.0.repeat must be an integer from 1"),
        ([{"mixer": "rwkv"}], "layers.0.mixer must be one of"),
        ({"pattern": "MX", "kinds": {"M": {}}}, r"must have every letter of the pattern, but lacks \['X'\]"),
        ({"pattern": "M"}, "layers must have a text `pattern` and `kinds`"),
        ([{"mixer": "mamba"}], "mamba is absent, but a layer needs it"),
        ([{"mlp": "moe"}], "moe is absent, but a layer needs it"),
    ],
)
def test_layers_written_wrongly_are_refused_with_their_place(layers, message):
    with pytest.raises(ValueError, match=message):
        model_from_mapping(FIELDS | {"layers": layers})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LayerSpec(mixer=Mixer.NONE, mlp=Mlp.NONE), "mixer and mlp must not both be none"),
        (lambda: LayerSpec(mixer=Mixer.MAMBA, window=4), "attention's, but the mixer is mamba"),
        (lambda: LayerSpec(mixer=Mixer.LINEAR, rope=False), "attention's, but the mixer is linear"),
        (lambda: LayerSpec(window=4, chunk=4), "must not both be set"),
        (lambda: LayerSpec(chunk=4, compression=2), "chunk goes with neither"),
        (lambda: LayerSpec(indexed=True, window=4), "indexed chooses among all keys"),
        (lambda: LayerSpec(hash_routed=True), "hash_routed needs mlp: moe"),
        (lambda: replace(TINY, layers=(LayerSpec(),)), r"num_layers \(2\) layers, but got 1"),
        (lambda: replace(TINY, moe=replace(MOE, num_dense_layers=1), **twice(LayerSpec(mlp=Mlp.MOE))),
         "num_dense_layers must be left out where layers are listed"),
        (lambda: replace(TINY, mtp_layer=LayerSpec()), "mtp_layer needs num_mtp_layers"),
        (lambda: replace(TINY, mamba=MAMBA), "mamba is given, but no layer uses it"),
        (lambda: replace(TINY, indexer=INDEXER, **twice(LayerSpec(indexed=True))), "indexer needs mla with a q_lora"),
        (lambda: replace(TINY, compressed=COMPRESSED), r"num_kv_heads \(2\) must be 1 with compressed"),
        (lambda: replace(TINY, num_kv_heads=1, compressed=COMPRESSED, attention_bias=True), "attention_bias must be f"),
        (lambda: replace(TINY, num_kv_heads=1, compressed=replace(COMPRESSED, o_groups=3)), "divisible by o_groups"),
        (lambda: replace(TINY, num_kv_heads=4, mla=MLA, attention_gate=True), "attention_gate must be false with mla"),
        (lambda: replace(MAMBA, groups=3), r"num_heads \(4\) must be divisible by groups \(3\)"),
        (lambda: replace(LINEAR, num_key_heads=3), r"num_value_heads \(4\) must be divisible by num_key_heads \(3\)"),
        (lambda: MoESpec(num_experts=4, top_k=2, ffn=16, shared_expert_gate=True), "shared_expert_gate needs shared"),
        (lambda: HyperSpec(streams=1), "streams must be at least 2"),
    ],
)  # fmt: skip
def test_an_impossible_layer_is_refused_with_the_law(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_equal_layers_are_one_kind_of_block_in_every_process():
    kind = BlockKind.of(LayerSpec(window=5, mlp=Mlp.MOE))
    assert kind is BlockKind.of(LayerSpec(mlp=Mlp.MOE, window=5)) is pickle.loads(pickle.dumps(kind))
    assert pickle.loads(pickle.dumps(BlockKind.HEAD)) is BlockKind.HEAD
    assert (kind.value, kind.is_layer, BlockKind.HEAD.is_layer) == ("window5+moe", True, False)
