"""One small model of each kind of layer, for claims that hold of all."""

from __future__ import annotations

from dataclasses import replace

from estimator.layers import LayerSpec, Mixer, Mlp, expand_layers
from estimator.model import MoESpec, QKNorm
from estimator.parts import CompressedSpec, HyperSpec, IndexerSpec, LinearAttentionSpec, MambaSpec
from tests.estimator.cases import DEEPSEEK, LLAMA

EXPERTS = MoESpec(num_experts=16, top_k=4, ffn=512, num_shared_experts=1, shared_ffn=512)
MAMBA = MambaSpec(num_heads=32, head_dim=64, state=64, groups=8)
INDEXER = IndexerSpec(num_heads=4, head_dim=64, top_k=256)

WINDOWED = replace(
    LLAMA, name="tiny-windowed", attention_sinks=True, attention_bias=True, attention_output_bias=True, mlp_bias=True,
    layers=(LayerSpec(window=128, mlp=Mlp.MOE), LayerSpec(mlp=Mlp.MOE)) * 4,
    moe=MoESpec(num_experts=16, top_k=4, ffn=512, router_bias=True),
)  # fmt: skip
CHUNKED = replace(
    LLAMA, name="tiny-chunked", qk_norm=QKNorm.UNWEIGHTED, moe=EXPERTS,
    layers=(LayerSpec(chunk=512), LayerSpec(chunk=512, mlp=Mlp.MOE), LayerSpec(rope=False),
            LayerSpec(chunk=512, mlp=Mlp.MOE)) * 2,
)  # fmt: skip
DELTA = replace(
    LLAMA, name="tiny-delta", qk_norm=QKNorm.HEAD, attention_gate=True, num_mtp_layers=1,
    layers=((LayerSpec(mixer=Mixer.LINEAR, mlp=Mlp.MOE),) * 3 + (LayerSpec(mlp=Mlp.MOE),)) * 2,
    linear=LinearAttentionSpec(num_key_heads=8, num_value_heads=16, key_head_dim=64, value_head_dim=64),
    moe=replace(EXPERTS, shared_expert_gate=True),
)  # fmt: skip
HYBRID = replace(
    LLAMA, name="tiny-hybrid", gated_mlp=False, mamba=MAMBA,
    layers=expand_layers(
        {"pattern": "M-M-M*-M", "kinds": {
            "M": {"mixer": "mamba", "mlp": "none"}, "-": {"mixer": "none"}, "*": {"mlp": "none"}}}, 8),
)  # fmt: skip
LATENT = replace(
    HYBRID, name="tiny-latent", moe=replace(EXPERTS, latent=256, router_correction_bias=True),
    layers=tuple(LayerSpec(mixer=Mixer.NONE, mlp=Mlp.MOE) if layer.mlp is Mlp.DENSE else layer
                 for layer in HYBRID.layers or ()),
)  # fmt: skip
SPARSE = replace(
    DEEPSEEK, name="tiny-sparse", indexer=INDEXER, moe=replace(EXPERTS, router_correction_bias=True),
    layers=(LayerSpec(indexed=True),) + (LayerSpec(indexed=True, mlp=Mlp.MOE),) * 7,
)  # fmt: skip
COMPRESSED = replace(
    LLAMA, name="tiny-compressed", num_kv_heads=1, head_dim=128, attention_sinks=True, num_mtp_layers=1,
    moe=replace(EXPERTS, router_correction_bias=True), indexer=INDEXER, hyper=HyperSpec(streams=4),
    compressed=CompressedSpec(q_lora_rank=256, o_groups=8, o_lora_rank=128, qk_rope_head_dim=32),
    layers=(
        LayerSpec(window=128, mlp=Mlp.MOE, hash_routed=True),
        LayerSpec(window=128, compression=4, indexed=True, mlp=Mlp.MOE, hash_routed=True),
        *(LayerSpec(window=128, compression=128, mlp=Mlp.MOE),
          LayerSpec(window=128, compression=4, indexed=True, mlp=Mlp.MOE)) * 3,
    ),
    mtp_layer=LayerSpec(window=128, mlp=Mlp.MOE),
)  # fmt: skip
PARALLEL = replace(LLAMA, name="tiny-parallel", parallel_block=True)
FULL_NORM = replace(LLAMA, name="tiny-full-norm", qk_norm=QKNorm.FULL)

KINDS = (WINDOWED, CHUNKED, DELTA, HYBRID, LATENT, SPARSE, COMPRESSED, PARALLEL, FULL_NORM)
