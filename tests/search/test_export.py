"""What export writes, import reads back: the identity over drawn strategies, and what no framework can say."""

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draws

import spaces
from estimator.layout import even_layers
from estimator.model_io import load_model
from estimator.strategy import (
    ContextParallel,
    CudaGraph,
    Fusion,
    Offload,
    Optimizer,
    Overlap,
    RankOrder,
    Recompute,
    RecomputeKind,
    Schedule,
    Strategy,
)
from estimator.workload import Workload
from hardware.catalog import cluster
from results.launchers import (
    FRAMEWORKS,
    deepspeed_table,
    megatron,
    megatron_cases,
    read_launch_file,
    torchtitan_table,
    write_launch_file,
)
from results.launchers.megatron_lm import LISTS
from results.launchers.names import arguments, paths
from results.launchers.recognise import flags_of
from search.axes import AXES, axis_values
from search.cli import main
from search.fold import folded_point
from search.idle import launchable
from search.launch_files import configured, given_of, job_of
from search.space import parse_space

MODELS = {name: load_model(name, [spaces.MODELS]) for name in ("llama3_70b", "deepseek_v3", "gpt_oss_20b", "gpt3_175b")}
MEGATRON_FUSIONS = [*megatron.FUSIONS, "flash_attention", "fused_activation"]
TITAN_FUSED = frozenset(map(Fusion, ("fused_activation", "fused_norm", "fused_rope")))


def sizes(draw, *, interleaves=True):
    pp = draw(draws.sampled_from([1, 2, 4]))
    vpp = draw(draws.sampled_from([1, 2, 3])) if pp > 1 and interleaves else 1
    return {
        "tp": draw(draws.sampled_from([1, 2, 8])),
        "cp": draw(draws.sampled_from([1, 2])),
        "pp": pp,
        "vpp": vpp,
        "micro_batch": draw(draws.sampled_from([1, 2, 4])),
        "schedule": Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B,
    }


def layout(draw, model, chunks):
    """Even, or with a layer moved from the middle to an end."""
    layers = list(even_layers(model.num_layers, chunks))
    if chunks > 2 and layers[1] > 1 and draw(draws.booleans()):
        layers[1] -= 1
        layers[draw(draws.sampled_from([0, -1]))] += 1
        return tuple(layers)
    return draw(draws.sampled_from([None, tuple(layers)])) if chunks > 1 else None


def bucket(draw, precision):
    return draw(draws.integers(1, 10**8)) * (2 if precision.endswith("bf16_grads") else 4)


@draws.composite
def of_megatron(draw, model):
    mine = sizes(draw)
    precisions = [*dict.fromkeys(case[0][0] for case in megatron_cases.PRECISION.cases)]
    precision = draw(draws.sampled_from(precisions))
    kind = draw(draws.sampled_from(["none", "full", "block", "modules"]))
    modules = draw(draws.lists(draws.sampled_from(megatron.MODULES), min_size=1, unique=True))
    overlaps = draw(draws.booleans())
    stage, reshard = draw(draws.sampled_from([(0, 1), (1, 1), (2, 1), (3, 1), (3, 0)]))
    fusion = draw(draws.lists(draws.sampled_from(MEGATRON_FUSIONS), unique=True))
    return Strategy(
        **mine,
        ep=draw(draws.sampled_from([1, 2, 8])) if model.moe else 1,
        etp=draw(draws.sampled_from([1, 2])) if model.moe else 1,
        layout=layout(draw, model, mine["pp"] * mine["vpp"]),
        interleave_group=draw(draws.sampled_from([0, 8])) if mine["vpp"] > 1 else 0,
        dp_replicate=draw(draws.sampled_from([1, 2])),
        sequence_parallel=draw(draws.booleans()),
        context_parallel=draw(draws.sampled_from(ContextParallel)),
        rank_order=draw(draws.sampled_from(RankOrder)),
        precision=precision,
        zero_stage=stage,
        reshard_after_forward=reshard,
        recompute=Recompute.parse(modules if kind == "modules" else kind),
        recompute_layers=draw(draws.integers(1, 9)) if kind == "block" else 0,
        optimizer=draw(draws.sampled_from(Optimizer)),
        overlap=Overlap(
            tp=draw(draws.sampled_from([0, 1])),
            ep=draw(draws.sampled_from([0, 1])),
            pp=draw(draws.sampled_from([0, 1])) if mine["vpp"] > 1 else 0,
            dp=int(overlaps or stage == 3),
        ),
        bucket_bytes=draw(draws.sampled_from([0, bucket(draw, precision)])) if overlaps or stage == 3 else 0,
        fusion=frozenset(map(Fusion, [*megatron.ALWAYS_FUSED, *fusion])),
        cuda_graph=draw(draws.sampled_from(CudaGraph)),
        shared_expert_overlap=draw(draws.booleans()),
        offload=Offload(
            states=draw(draws.sampled_from([0, 0.5, 1])), activations=draw(draws.sampled_from([0, 0.25, 1]))
        ),
    )


@draws.composite
def of_titan(draw, model):
    mine = sizes(draw)
    if mine["pp"] > 1:
        one = [Schedule.ONE_F_ONE_B, Schedule.GPIPE]
        two = [
            Schedule.INTERLEAVED,
            Schedule.BREADTH_FIRST,
            *([Schedule.ZB_V, Schedule.DUALPIPE_V] * (mine["vpp"] == 2)),
        ]
        mine["schedule"] = draw(draws.sampled_from(one if mine["vpp"] == 1 else two))
    stage = draw(draws.sampled_from([3, 3, 0])) if mine["cp"] == 1 else 3
    compiled, loss = draw(draws.booleans()), draw(draws.booleans())
    offloaded = draw(draws.sampled_from([0, 1]))
    return Strategy(
        **mine,
        ep=draw(draws.sampled_from([1, 2, 8])) if model.moe else 1,
        etp=draw(draws.sampled_from([1, mine["tp"]])) if model.moe else 1,
        layout=layout(draw, model, mine["pp"] * mine["vpp"]),
        dp_replicate=draw(draws.sampled_from([1, 2])) if stage else 1,
        sequence_parallel=mine["tp"] > 1,
        context_parallel=draw(draws.sampled_from([ContextParallel.RING, ContextParallel.ALL_GATHER])),
        precision=draw(draws.sampled_from(["bf16", "fp32", "fp8", "mxfp8"])),
        zero_stage=stage,
        reshard_after_forward=draw(draws.sampled_from([0, 1])) if stage else 1,
        recompute=Recompute.parse(draw(draws.sampled_from(["none", "full"]))),
        overlap=Overlap(
            tp=draw(draws.sampled_from([0, 1])),
            ep=draw(draws.sampled_from([0, 1])) if mine["schedule"] is Schedule.DUALPIPE_V else 0,
            dp=int(stage == 3),
        ),
        bucket_bytes=0,
        fusion=frozenset({Fusion.FLASH_ATTENTION, *(TITAN_FUSED if compiled else ()), *([Fusion.FUSED_LOSS] * loss)}),
        offload=Offload(parameters=offloaded, gradients=offloaded, states=offloaded),
    )


@draws.composite
def of_deepspeed(draw, model):
    mine = sizes(draw, interleaves=False)
    stage = draw(draws.sampled_from([0, 1, 2, 3] if mine["pp"] == 1 else [0, 1]))
    overlaps = draw(draws.sampled_from([0, 1]))
    precision = draw(draws.sampled_from(["fp32", "bf16", "bf16_grads", "fp16"]))
    kind = draw(draws.sampled_from(["none", "full", "block", "core_attn"]))
    share = draw(draws.sampled_from([0, 0.5, 1]))
    fusion = draw(draws.lists(draws.sampled_from(["flash_attention", *deepspeed_table.FUSIONS]), unique=True))
    return Strategy(
        **mine,
        context_parallel=ContextParallel.ULYSSES if mine["cp"] > 1 else ContextParallel.RING,
        sequence_parallel=draw(draws.booleans()),
        precision=precision,
        zero_stage=stage,
        recompute=Recompute.parse(kind),
        recompute_layers=draw(draws.integers(1, 9)) if kind == "block" else 0,
        optimizer=draw(draws.sampled_from([Optimizer.ADAM, Optimizer.SGD])),
        overlap=Overlap(dp=overlaps),
        bucket_bytes=bucket(draw, precision) if overlaps else 0,
        fusion=frozenset(map(Fusion, [*deepspeed_table.ALWAYS_FUSED, *fusion])),
        offload=Offload(
            states=share,
            gradients=share,
            parameters=draw(draws.sampled_from([0, 1])),
            activations=draw(draws.sampled_from([0, 1])) if kind == "full" else 0,
        ),
    )


DRAWS = {
    "megatron-lm": (of_megatron, ("llama3_70b", "deepseek_v3", "gpt_oss_20b", "gpt3_175b")),
    "megatron-bridge": (of_megatron, ("llama3_70b", "deepseek_v3", "gpt_oss_20b")),
    "torchtitan": (of_titan, ("llama3_70b", "gpt_oss_20b")),
    "deepspeed": (of_deepspeed, ("llama3_70b", "gpt3_175b")),
}


def effective(strategy, space):
    """The strategy with its layers written out, and what has no effect at its default."""
    model = space.model
    chunks = strategy.pp * strategy.vpp
    layers = strategy.layout or even_layers(model.num_layers, chunks)
    buckets = strategy.bucket_bytes if strategy.overlap.dp and strategy.zero_stage < 3 else 0
    idle = {Fusion.FUSED_SOFTMAX} if Fusion.FLASH_ATTENTION in strategy.fusion else set()
    idle |= set() if model.attention_dropout or model.hidden_dropout else {Fusion.FUSED_DROPOUT}
    idle |= set() if model.moe else {Fusion.FUSED_PERMUTE, Fusion.FUSED_ROUTER}
    idle |= set() if model.mla else {Fusion.FUSED_MLA_PROJECTIONS}
    plain = dataclasses.replace(strategy, layout=layers, bucket_bytes=buckets, fusion=strategy.fusion - idle)
    alone, _ = folded_point(space, plain)
    return launchable(model, alone.strategy(), space.system)


def differences(back, strategy):
    a, b = (axis_values(effective(s, back)) for s in (back.strategy(), strategy))
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}


def job(model, strategy, dp=4, seq=4096, name="drawn"):
    system = cluster("dgx_h100", num_chips=strategy.tp * strategy.cp * strategy.pp * dp)
    work = Workload(seq=seq, global_batch=64 * dp)
    return job_of(name, model, strategy, system, work)


def read_back(path, text, model=None):
    path.write_text(text)
    found = read_launch_file(path, given_of(model, None, None, {}))
    config = configured(found, source=str(path), model=model, system="dgx_h100")
    assert config.missing == ()
    return found, parse_space(config.yaml("back"), "back.yaml")


@pytest.mark.parametrize(("framework", "name"), [(f, name) for f, (_, names) in DRAWS.items() for name in names])
def test_import_of_an_export_is_the_identity(framework, name, tmp_path):
    model = MODELS[name]

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(DRAWS[framework][0](model))
    def holds(strategy):
        if framework == "megatron-bridge" and not strategy.reshard_after_forward:
            return
        mine = job(model, strategy, seq=model.max_positions or 4096)
        found, back = read_back(tmp_path / "job", write_launch_file(mine, framework))
        assert found.unknown == found.unmodelled == ()
        assert differences(back, strategy) == {}
        assert (back.workload, back.system.num_chips) == (Workload(seq=mine.seq, global_batch=256), mine.num_chips)
        if framework != "torchtitan":
            assert dataclasses.replace(back.model, name=name) == model

    holds()


def written_names(framework):
    tables = {"torchtitan": torchtitan_table.STRATEGY, "deepspeed": deepspeed_table.STRATEGY}
    return {name for row in tables.get(framework, megatron.STRATEGY) for name in row.names}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_name_of_a_table_is_on_the_pinned_list_of_its_framework(framework):
    dests = {a.dest for a in arguments(*LISTS, *(["megatron_deepspeed"] * (framework == "deepspeed"))).values()}
    listed = {"torchtitan": paths("torchtitan"), "deepspeed": paths("deepspeed")}.get(framework)
    for name in written_names(framework):
        assert name in dests or (listed and name in listed.costs), name


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", list(MODELS))
def test_every_name_that_is_written_is_on_the_pinned_list(framework, name):
    strategy = Strategy(tp=2, pp=2, sequence_parallel=True, zero_stage=1, overlap=Overlap(tp=1, dp=1))
    told, _ = flags_of(job(MODELS[name], strategy), framework)
    known = arguments("megatron_lm", "megatron_deepspeed")
    listed = paths({"megatron-lm": "megatron_bridge"}.get(framework, framework.replace("-", "_")))
    for written in told:
        assert written in known if written.startswith("--") else written in listed.costs, written


@pytest.mark.parametrize(
    ("table", "without"),
    [
        (megatron.STRATEGY, megatron.WITHOUT_WORDS),
        (torchtitan_table.STRATEGY, torchtitan_table.WITHOUT_WORDS),
        (deepspeed_table.STRATEGY, deepspeed_table.WITHOUT_WORDS),
    ],
)
def test_every_axis_has_words_or_a_reason_why_not(table, without):
    said = {key for row in table for key in row.keys}
    assert said | set(without) == {axis.name for axis in AXES}
    assert not said & set(without)


@pytest.mark.parametrize(
    ("framework", "change", "told"),
    [
        ("megatron-lm", {"schedule": Schedule.DUALPIPE, "pp": 2}, "schedule dualpipe"),
        ("megatron-lm", {"recompute": Recompute.parse("mlp_act")}, "recompute mlp_act"),
        ("megatron-lm", {"precision": "fp8_block"}, "precision fp8_block"),
        ("torchtitan", {"zero_stage": 1}, "zero_stage 1"),
        ("torchtitan", {"precision": "nvfp4"}, "precision nvfp4"),
        ("deepspeed", {"zero_stage": 3, "pp": 2}, "zero_stage 3"),
        ("deepspeed", {"vpp": 2, "pp": 2, "schedule": Schedule.INTERLEAVED}, "schedule interleaved"),
        ("megatron-bridge", {"offload": Offload(parameters=1)}, "offload.parameters 1"),
        (
            "megatron-bridge",
            {"recompute": Recompute(kind=RecomputeKind.BLOCK), "recompute_per_chunk": (1,)},
            "per_chunk",
        ),
    ],
)
def test_what_decides_memory_or_learning_is_refused_in_one_line(framework, change, told):
    strategy = dataclasses.replace(Strategy(zero_stage=3 if framework == "torchtitan" else 0), **change)
    with pytest.raises(ValueError, match="has no words for") as refused:
        write_launch_file(job(MODELS["llama3_70b"], strategy), framework)
    assert told in str(refused.value)
    assert "--set strategy." in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("framework", "change", "told"),
    [
        ("megatron-lm", {"prefetch_blocks": 3, "zero_stage": 3}, "prefetch_blocks 3"),
        ("megatron-lm", {"pp": 2, "overlap": Overlap(pp=1)}, "overlap.pp 1"),
        ("torchtitan", {"rank_order": RankOrder.TP_CP_PP_DP}, "rank_order tp-cp-pp-dp"),
        ("deepspeed", {"overlap": Overlap(tp=1), "tp": 2, "sequence_parallel": True}, "overlap.tp 1"),
        ("deepspeed", {"cuda_graph": CudaGraph.LAYER}, "cuda_graph layer"),
        (
            "megatron-lm",
            {},
            "is written as near as Megatron-LM can: Megatron always has fused_gate_up, fused_qkv as well",
        ),
        ("torchtitan", {}, "is written as near as TorchTitan can: torch.compile makes it"),
    ],
)
def test_what_only_costs_time_is_a_note_in_the_file(framework, change, told):
    strategy = dataclasses.replace(Strategy(zero_stage=3 if framework == "torchtitan" else 0), **change)
    text = write_launch_file(job(MODELS["llama3_70b"], strategy), framework)
    assert any(told in line for line in text.splitlines() if line.startswith("# note: "))


V3 = "deepseek_v3"


@pytest.mark.parametrize(
    ("change", "flags", "name"),
    [
        ({"cp": 2, "context_parallel": ContextParallel.ULYSSES}, "--context-parallel-size 2 --cp-comm-type a2a", ""),
        ({"cp": 2, "context_parallel": ContextParallel.ALL_GATHER}, "--cp-comm-type allgather", ""),
        ({"rank_order": RankOrder.TP_CP_PP_DP}, "--use-tp-pp-dp-mapping", ""),
        ({"ep": 8, "etp": 2}, "--expert-model-parallel-size 8 --expert-tensor-parallel-size 2", V3),
        ({"pp": 4, "vpp": 5, "schedule": Schedule.INTERLEAVED, "interleave_group": 8},
         "--microbatch-group-size-per-virtual-pipeline-stage 8 --num-virtual-stages-per-pipeline-rank 5", ""),
        ({"pp": 4, "layout": (21, 20, 20, 19)}, "--pipeline-model-parallel-layout 'Et*21|(t*20|)*2t*19L'", ""),
        ({"pp": 4}, "--pipeline-model-parallel-layout 'Et*15|t*16|t*15|t*15mL'", V3),
        ({"zero_stage": 1}, "--use-distributed-optimizer", ""),
        ({"zero_stage": 2}, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", ""),
        ({"zero_stage": 3}, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", ""),
        ({"dp_replicate": 2}, "--num-distributed-optimizer-instances 2", ""),
        ({"overlap": Overlap(dp=1), "bucket_bytes": 400}, "--overlap-grad-reduce --ddp-bucket-size 100", ""),
        ({"overlap": Overlap(dp=1), "bucket_bytes": 400, "precision": "bf16_grads"}, "--ddp-bucket-size 200", ""),
        ({"overlap": Overlap(tp=1)}, "--tp-comm-overlap", ""),
        ({"overlap": Overlap(ep=1)}, "--overlap-moe-expert-parallel-comm", V3),
        ({"shared_expert_overlap": True}, "--moe-shared-expert-overlap", V3),
        ({"precision": "fp16"}, "--fp16", ""),
        ({"precision": "fp8"}, "--bf16 --fp8-format hybrid --fp8-recipe delayed", ""),
        ({"precision": "fp8_1x128_bf16_grads"},
         "--bf16 --fp8-format hybrid --fp8-recipe blockwise --grad-reduce-in-bf16", ""),
        ({"precision": "mxfp8"}, "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", ""),
        ({"precision": "nvfp4"}, "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4", ""),
        ({"recompute": Recompute.parse("full")},
         "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ""),
        ({"recompute": Recompute.parse("block"), "recompute_layers": 3},
         "--recompute-granularity full --recompute-method block --recompute-num-layers 3", ""),
        ({"recompute": Recompute.parse("mla_up_proj+layernorm")},
         "--recompute-granularity selective --recompute-modules layernorm mla_up_proj", V3),
        ({"optimizer": Optimizer.MUON}, "--optimizer muon", ""),
        ({"optimizer": Optimizer.ADAM_8BIT},
         "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8", ""),
        ({"cuda_graph": CudaGraph.ATTENTION}, "--cuda-graph-impl transformer_engine --cuda-graph-modules attn", ""),
        ({"cuda_graph": CudaGraph.FULL}, "--cuda-graph-impl full_iteration", ""),
        ({"offload": Offload(states=0.5)}, "--optimizer-cpu-offload --optimizer-offload-fraction 0.5", ""),
        ({"fusion": frozenset({Fusion.FUSED_LOSS})},
         "--attention-backend unfused --no-bias-swiglu-fusion --cross-entropy-loss-fusion --no-rope-fusion", ""),
        ({}, "--multi-latent-attention", V3),
        ({}, "--moe-layer-freq '([0]*3+[1]*58)'", V3),
        ({}, "--window-size '(127,0)' --window-attn-skip-freq '[1,0]*12'", "gpt_oss_20b"),
        ({}, "--softmax-type learnable", "gpt_oss_20b"),
        ({}, "--position-embedding-type learned_absolute --max-position-embeddings 2048", "gpt3_175b"),
    ],
)  # fmt: skip
def test_a_choice_is_written_in_the_words_of_megatron(change, flags, name):
    text = write_launch_file(
        job(MODELS[name or "llama3_70b"], dataclasses.replace(Strategy(), **change)), "megatron-lm"
    )
    lines = [line.strip(" \\") for line in text.splitlines()]
    for flag in flags.replace(" --", "\n--").splitlines():
        assert flag in lines, text


@pytest.mark.parametrize(
    ("framework", "change", "told"),
    [
        ("megatron-bridge", {"tp": 2, "sequence_parallel": True},
         {"model.tensor_model_parallel_size": "2", "model.sequence_parallel": "True"}),
        ("megatron-bridge", {"precision": "fp8_bf16_grads"},
         {"mixed_precision.fp8": "hybrid", "mixed_precision.grad_reduce_in_fp32": "False"}),
        ("megatron-bridge", {"pp": 4, "vpp": 5, "schedule": Schedule.INTERLEAVED},
         {"model.virtual_pipeline_model_parallel_size": "5", "model.pipeline_model_parallel_layout": "None"}),
        ("torchtitan", {"pp": 4, "schedule": Schedule.ZB_V, "vpp": 2},
         {"parallelism.pipeline_parallel_schedule": "ZBVZeroBubble", "parallelism.pipeline_parallel_degree": "4"}),
        ("torchtitan", {"dp_replicate": 2, "reshard_after_forward": 0},
         {"parallelism.data_parallel_replicate_degree": "2", "parallelism.data_parallel_shard_degree": "2",
          "parallelism.fsdp_reshard_after_forward": "never"}),
        ("torchtitan", {"cp": 2, "context_parallel": ContextParallel.RING},
         {"parallelism.context_parallel_rotate_method": "alltoall"}),
        ("deepspeed", {"overlap": Overlap(dp=1), "bucket_bytes": 400, "precision": "bf16_grads"},
         {"zero_optimization.reduce_bucket_size": "200", "data_types.grad_accum_dtype": "bf16"}),
        ("deepspeed", {"offload": Offload(states=1, gradients=1, parameters=1)},
         {"zero_optimization.offload_optimizer.device": "cpu", "zero_optimization.offload_param.device": "cpu"}),
        ("deepspeed", {"cp": 2, "context_parallel": ContextParallel.ULYSSES}, {"--ds-sequence-parallel-size": "2"}),
    ],
)  # fmt: skip
def test_a_choice_is_written_in_the_words_of_its_framework(framework, change, told):
    found, _ = flags_of(job(MODELS["llama3_70b"], dataclasses.replace(Strategy(zero_stage=3), **change)), framework)
    assert {name: found.get(name) for name in told} == told


def test_schedules_of_torchtitan_are_those_of_torch():
    from torch.distributed.pipelining.schedules import get_schedule_class

    for name in torchtitan_table.SCHEDULES.values():
        assert get_schedule_class(name).__name__ == f"Schedule{name}"


def test_a_model_with_mamba_layers_is_refused():
    model = load_model("nemotron_h_56b", [spaces.MODELS])
    for framework in FRAMEWORKS:
        with pytest.raises(ValueError, match="has no words for model"):
            write_launch_file(job(model, Strategy(zero_stage=3)), framework)


def test_a_published_job_goes_out_and_comes_back(tmp_path, capsys):
    """Llama 3 70B's rule of thumb: tp 8, pp 4, vpp 5, as it ships in spaces/llama3_70b.yaml."""
    script = tmp_path / "llama.sh"
    code = main(["export", "llama3_70b:rule_of_thumb", "--to", "megatron-lm", "-o", str(script)])
    assert code == 0, capsys.readouterr().err
    text = script.read_text()
    for flag in ("--tensor-model-parallel-size 8", "--pipeline-model-parallel-size 4",
                 "--num-virtual-stages-per-pipeline-rank 5", "--bf16", "--nnodes 64"):  # fmt: skip
        assert flag in text
    assert main(["import", str(script), "--system", "dgx_h100", "--json"]) == 0
    back = json.loads(capsys.readouterr().out)
    assert back["unknown"] == []
    assert back["config"]["strategy"]["vpp"] == 5
    assert back["config"]["system"] == {"cluster": "dgx_h100", "num_chips": 512}


IDLE = {
    "megatron-lm": ("--sequence-parallel", "--cp-comm-type", "--use-tp-pp-dp-mapping", "--tp-comm-overlap",
                    "--overlap-p2p-communication", "--num-distributed-optimizer-instances"),
    "megatron-bridge": ("sequence_parallel: true", "cp_comm_type: a2a", "use_tp_pp_dp_mapping: true",
                        "tp_comm_overlap: true"),
    "torchtitan": ("enable_async_tensor_parallel = true",),
    "deepspeed": ("--sequence-parallel", "no-masked-softmax-fusion", "no-bias-dropout-fusion"),
}  # fmt: skip


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_export_says_nothing_that_has_no_effect(framework, capsys):
    """tp, cp and pp are 1, so what goes with them means nothing; no dropout, so no kernel for it."""
    sets = ["sequence_parallel=true", "context_parallel=ulysses", "rank_order=tp-cp-pp-dp", "overlap={tp: 1, pp: 1}",
            "zero_stage=3", "prefetch_blocks=1"]  # fmt: skip
    words = [word for text in sets for word in ("--set", f"strategy.{text}")]
    assert main(["export", "llama3_8b_small:fully_sharded", "--to", framework, *words]) == 0
    told = capsys.readouterr()
    lines = [line for line in told.out.splitlines() if not line.startswith("#")]
    for name in IDLE[framework]:
        assert not any(name in line for line in lines), name
    assert not any("fused_dropout" in line for line in lines)
    assert "sequence_parallel: true has no effect where tp is 1" in told.err
    notes = [line for line in told.out.splitlines() if line.startswith("# note: ")]
    assert not any(a in note for note in notes for a in ("overlap.tp", "overlap.pp", "rank_order", "context_parallel"))


def test_an_export_that_is_illegal_says_which_rule(tmp_path, capsys):
    assert main(["export", "llama3_70b:rule_of_thumb", "--to", "deepspeed", "--set", "strategy.tp=7"]) == 2
    assert "num_chips (512) must be divisible by tp (7)" in capsys.readouterr().err


def test_an_axis_value_is_the_value_of_the_file_format():
    assert {axis.name for axis in AXES} == set(axis_values(Strategy()))
