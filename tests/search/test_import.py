"""`search import` on files as users post them, and on what is no launch file."""

import json
import re

import pytest
import yaml

from search.cli import main
from search.space import parse_space

FOLDER = "launch_files"


def imported(capsys, path, *options):
    code = main(["import", str(path), "--json", *options])
    out = capsys.readouterr()
    assert code == 0, out.err
    return json.loads(out.out)


def refused(capsys, path, *options):
    assert main(["import", str(path), *options]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def within(expected, actual):
    """Every expected value, however deep."""
    for key, value in expected.items():
        if isinstance(value, dict):
            within(value, actual[key])
        else:
            assert actual[key] == value, key


GPT = {"gated_mlp": False, "norm": "layer", "tied_embeddings": True, "mlp_bias": True, "vocab": 50257}
FILES = {
    "mlm-606_llama2-7b_tp1pp1.sh": {
        "framework": "megatron-lm",
        "num_gpus": 8,
        "config": {
            "model": {"num_layers": 32, "hidden": 4096, "ffn": 11008, "num_heads": 32, "num_kv_heads": 32,
                      "head_dim": 128, "max_positions": 64, **GPT},
            "workload": {"seq": 64, "global_batch": 8},
            "strategy": {"tp": 1, "pp": 1, "cp": 1, "micro_batch": 1, "precision": "fp32", "zero_stage": 0,
                         "sequence_parallel": False, "recompute": "none"},
        },
        "unknown": [],
        "ignored": ["--train-iters", "--lr", "--min-lr", "--weight-decay", "--clip-grad"],
        "missing": [],
    },
    "mlm-1025_cp4_128k.sh": {
        "framework": "megatron-lm",
        "num_gpus": 4,
        "config": {
            "model": {"num_layers": 24, "hidden": 128, "ffn": 320, "num_heads": 16, "head_dim": 8, "gated_mlp": True,
                      "norm": "rms", "max_positions": 0},
            "workload": {"seq": 131072, "global_batch": 1},
            "strategy": {"tp": 1, "cp": 4, "pp": 1, "context_parallel": "ring", "precision": "bf16", "zero_stage": 1,
                         "micro_batch": 1},
        },
        "unknown": [],
        "ignored": ["--rotary-percent", "--rotary-base", "--train-iters"],
        "missing": [],
    },
    "mds-474_zero3_pp1.sh": {
        "framework": "deepspeed",
        "num_gpus": 4,
        "config": {
            "model": {"num_layers": 24, "hidden": 1024, "ffn": 4096, "num_heads": 16, "max_positions": 1024, **GPT},
            "workload": {"seq": 1024, "global_batch": 32},
            "strategy": {"tp": 4, "pp": 1, "micro_batch": 4, "precision": "fp16", "zero_stage": 3,
                         "recompute": "full"},
        },
        "unknown": [],
        "ignored": ["--train-iters", "--deepspeed-activation-checkpointing"],
    },
    "ds-568_zero2_pipeline.json": {
        "framework": "deepspeed",
        "num_gpus": None,
        "config": {
            "model": None,
            "workload": {"seq": None, "global_batch": 2},
            # 5e6 elements of gradients that are accumulated in fp32
            "strategy": {"micro_batch": 1, "zero_stage": 2, "precision": "fp16", "overlap": {"dp": 0},
                         "bucket_bytes": 20_000_000, "offload": {"states": 0}},
        },
        "unknown": ["_source"],
        "unmodelled": ["zero_optimization.contiguous_gradients"],
        "ignored": ["fp16.loss_scale", "fp16.loss_scale_window", "fp16.hysteresis", "fp16.min_loss_scale"],
    },
    "mbridge-5391_layout.py": {
        "framework": "megatron-bridge",
        "num_gpus": None,
        "config": {
            "model": None,
            "workload": {"seq": None, "global_batch": 256},
            "strategy": {"tp": 4, "pp": 8, "vpp": 5, "cp": 1, "sequence_parallel": True, "micro_batch": 1,
                         "schedule": "interleaved", "layout": "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"},
        },
        "unknown": [],
        "ignored": [],
    },
    "titan-1932_llama4.toml": {
        "framework": "torchtitan",
        "num_gpus": None,
        "config": {
            "model": None,
            "workload": {"seq": 4096, "global_batch": None},
            "strategy": {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1, "dp_replicate": 1, "zero_stage": 3,
                         "micro_batch": 16, "recompute": "full", "optimizer": "adam", "precision": "bf16",
                         "overlap": {"tp": 0, "dp": 1}},
        },
        "unknown": [],
        "ignored": ["optimizer.lr", "optimizer.eps", "training.max_norm", "training.steps", "training.dataset"],
    },
    "nanotron-161_llama3-8b.yaml": {
        "framework": "nanotron",
        "num_gpus": None,
        "config": {
            "model": {"num_layers": 32, "hidden": 4096, "ffn": 14336, "num_heads": 32, "num_kv_heads": 8,
                      "head_dim": 128, "vocab": 128256, "tied_embeddings": False, "vocab_multiple": 1},
            "workload": {"seq": None, "global_batch": None},
            "strategy": {"precision": "bf16", "optimizer": "adam", "bucket_bytes": 25 * 2**20},
        },
        "unknown": [],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(FILES))
def test_a_file_as_users_post_it_says_what_it_states(name, shared, capsys):
    within(FILES[name], imported(capsys, shared / FOLDER / name, "--system", "dgx_h100"))


def test_every_file_as_users_post_them_is_among_these(shared):
    assert {p.name for p in (shared / FOLDER).iterdir() if p.suffix != ".md"} == set(FILES)


def test_what_a_file_lacks_is_asked_for_line_by_line(shared, capsys):
    path = shared / FOLDER / "mbridge-5391_layout.py"
    assert main(["import", str(path)]) == 0
    out = capsys.readouterr()
    asked = [line.partition(": ")[2] for line in out.err.splitlines()]
    assert [line.partition(":")[0] for line in asked] == ["GPUs", "model", "sequence length", "system"]
    assert "give --gpus N" in asked[0]
    assert "search catalog clusters" in asked[-1]
    assert "system" not in yaml.safe_load(out.out)


def test_a_file_with_all_that_is_asked_for_is_a_configuration(shared, capsys, tmp_path):
    path = shared / FOLDER / "mbridge-5391_layout.py"
    options = ["--gpus", "64", "--model", "llama3_70b", "--system", "dgx_h100", "--set", "workload.seq=8192"]
    target = tmp_path / "mine.yaml"
    assert main(["import", str(path), *options, "-o", str(target)]) == 0
    assert capsys.readouterr().err == ""
    space = parse_space(target.read_text(), "mine.yaml")
    assert space.strategy().layout == (2,) * 35 + (3,) + (2,) * 3 + (1,)
    assert (space.system.num_chips, space.workload.seq) == (64, 8192)


SCRIPT = """#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=${TP:-2}
PP=$((TP * 2))   # stages
MODEL=(
  --num-layers 16 --hidden-size 1024
  --num-attention-heads 16   # heads
  --group-query-attention --num-query-groups 4
  --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
  --position-embedding-type rope --vocab-size 32000
)
DATA="--data-path $DATA_PATH --tokenizer-type NullTokenizer"
PARALLEL="--tensor-model-parallel-size $TP \\
  --pipeline-model-parallel-size $PP --sequence-parallel"
if [ "$LOG" ]; then EXTRA="--log-throughput"; fi
srun python pretrain_gpt.py "${MODEL[@]}" $PARALLEL $DATA \\
  --seq-length 4096 --micro-batch-size 2 --global-batch-size 64 --bf16 --use-distributed-optimizer \\
  --overlap-grad-reduce --recompute-granularity selective --recompute-modules layernorm mlp \\
  --fp8-format hybrid --fp8-recipe blockwise --frobnicate 3 --moe-enable-deepep 2>&1 | tee log
"""


def test_a_script_is_read_as_far_as_it_is_determined(tmp_path, capsys):
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT)
    found = imported(capsys, path)
    within(
        {
            "num_gpus": 32,
            "unknown": ["--frobnicate"],
            "unmodelled": ["--moe-enable-deepep"],
            "ignored": ["--data-path"],
            "config": {
                "model": {"num_layers": 16, "num_kv_heads": 4, "ffn": 2688, "vocab": 32000, "attention_bias": False},
                "workload": {"seq": 4096, "global_batch": 64},
                "strategy": {"tp": 2, "pp": 4, "sequence_parallel": True, "micro_batch": 2, "zero_stage": 1,
                             "precision": "fp8_1x128", "recompute": "layernorm+mlp", "overlap": {"dp": 1}},
            },
        },
        found,
    )  # fmt: skip
    assert imported(capsys, path, "--define", "TP=4")["config"]["strategy"]["pp"] == 8


BRANCHES = """
DTYPE=fp8; SIZE=${SIZE:-"8b"}; MORE=(--bf16)
if [[ "$DTYPE" == "fp8" ]]; then
    MORE+=("--fp8-format hybrid" "--fp8-recipe mxfp8")
elif [ $SIZE = 8b ]; then
    MORE+=(--sequence-parallel)
else
    MORE=(--fp16)
fi
while [ $# -gt 0 ]; do DTYPE=$1; shift; done
LAYERS=4
if [ "$SIZE" != "8b" ] || [ $LAYERS -ge 4 ] && [ -n "$DTYPE" ]; then LAYERS=8; fi
LOGS=(--log-interval 1)
if [ -n "${WANDB_API_KEY}" ]; then LOGS+=(--wandb-project x); fi
echo torchrun pretrain.py --num-layers $LAYERS ${MORE[@]}
mkdir -p "$(dirname "$HOME/x")"
torchrun --nproc_per_node 8 pretrain.py --num-layers $LAYERS --hidden-size 512 --num-attention-heads 8 \\
    --vocab-size 1000 --seq-length 128 ${MORE[@]} ${LOGS[@]}
"""


def test_branches_that_a_script_decides_itself_are_taken(tmp_path, capsys):
    path = tmp_path / "branches.sh"
    path.write_text(BRANCHES)
    found = imported(capsys, path)
    assert found["config"]["strategy"]["precision"] == "mxfp8"
    assert found["config"]["strategy"]["sequence_parallel"] is False
    assert found["config"]["model"]["num_layers"] == 8
    assert found["unknown"] == ["$LOGS"]  # whether wandb is told depends on the environment
    assert found["ignored"] == ["--log-interval"]


HERE = """
DIR=`pwd`
CONFIG="$(dirname $0)/ds_config.json"
TP=${TP:-2}; STAGE=1; MICRO=4; BATCH=$((MICRO * 4))
options=" \\
    --tensor-model-parallel-size $TP --num-layers 8 --hidden-size 512 --num-attention-heads 8 \\
    --seq-length 128 --micro-batch-size $MICRO --global-batch-size $BATCH --bf16 --checkpoint-activations \\
    --deepspeed --deepspeed_config=${CONFIG} --zero-stage=${STAGE}"
cat <<EOT > $CONFIG
{"train_batch_size": $BATCH, "train_micro_batch_size_per_gpu": $MICRO,
 "zero_optimization": {"stage": $STAGE, "overlap_comm": true, "reduce_bucket_size": 1e6},
 "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}
EOT
run_cmd="deepspeed --num_nodes 1 --num_gpus 8 ${DIR}/pretrain_gpt.py $@ ${options}"
echo ${run_cmd}
eval ${run_cmd}
"""


def test_a_script_of_deepspeed_with_its_json_as_a_here_document_is_read_whole(tmp_path, capsys):
    path = tmp_path / "ds.sh"
    path.write_text(HERE)
    found = imported(capsys, path, "--system", "dgx_a100")
    within(
        {
            "framework": "deepspeed",
            "num_gpus": 8,
            "unknown": [],
            "missing": [],
            "config": {
                "workload": {"seq": 128, "global_batch": 16},
                "strategy": {"tp": 2, "zero_stage": 1, "precision": "bf16", "recompute": "full", "micro_batch": 4,
                             "overlap": {"dp": 1}, "bucket_bytes": 4_000_000},
            },
        },
        found,
    )  # fmt: skip
    path.write_text(HERE.replace('"stage": $STAGE', '"stage": 2'))
    assert "zero_optimization.stage (2) must be --zero-stage (1)" in refused(capsys, path)
    path.write_text(HERE.replace('"bf16": {', '"bf16": '))
    assert f"{path}:12: must be JSON" in refused(capsys, path)


FORMER = """
[model]
name = "llama3"
flavor = "405B"
converters = "float8"
[training]
batch_size = 2
seq_len = 8192
compile = true
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = 'full'
[float8]
enable_fsdp_float8_all_gather = true
"""


def test_a_toml_of_a_former_torchtitan_is_read_by_its_names(tmp_path, capsys):
    path = tmp_path / "405b.toml"
    path.write_text(FORMER)
    found = imported(capsys, path, "--gpus", "128", "--system", "dgx_h100")
    within(
        {
            "unknown": [],
            "unmodelled": ["float8.enable_fsdp_float8_all_gather"],
            "missing": [],
            "config": {
                "model": "llama3_405b",
                "workload": {"seq": 8192, "global_batch": 32},
                "strategy": {"tp": 8, "micro_batch": 2, "precision": "fp8", "recompute": "full", "zero_stage": 3,
                             "sequence_parallel": True, "overlap": {"tp": 1, "dp": 1}},
            },
        },
        found,
    )  # fmt: skip


ARGUMENTS = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --vocab-size 1000 "


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--tensor-model-parallel-size two", "--tensor-model-parallel-size must be a whole number of at least 1"),
        ("--tensor-model-parallel-size $TP", "--tensor-model-parallel-size needs $TP, which the script does not set"),
        ("--tensor-model-parallel-size $(nproc)", "needs $$(...)"),
        ("--bf16 --fp16", "--bf16 and --fp16 exclude one another"),
        ("--bf16=3", "--bf16 takes no value"),
        ("--micro-batch-size --bf16", "--micro-batch-size must be followed by a value"),
        ("--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2", "exclude one another"),
        ("--recompute-granularity some", "must be full or selective"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|tL'", "must hold 8 layers"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|t'", "must start with E and end with"),
        ("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 3", "share evenly"),
        ("--num-experts 4 --moe-layer-freq '__import__(1)'", "must be a number or lists"),
        ("--num-experts 4 --moe-layer-freq '([1]*9)'", "one number for each of 8 layers"),
        ("--group-query-attention --num-query-groups 3", "num_heads (8) must be divisible by num_kv_heads (3)"),
        ("--num-layers 1e15", "--num-layers must be at most 10000"),
        ("--tensor-model-parallel-size -1", "must be a whole number of at least 1"),
        ("--tensor-model-parallel-size 1e400", "must be a whole number of at least 1"),
        ("--kv-channels 0", "must be a whole number of at least 1"),
    ],
)
def test_what_is_wrong_in_a_script_is_one_line_with_its_place(text, told, tmp_path, capsys):
    path = tmp_path / "bad.sh"
    path.write_text(
        "#!/bin/bash\n" + f"torchrun --nproc_per_node 8 --nnodes 3 pretrain_gpt.py {ARGUMENTS} \\\n {text}\n"
    )
    err = refused(capsys, path)
    assert told in err
    assert str(path) in err


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("empty.sh", b"", "is empty"),
        ("blank.yaml", b" \n\n", "is empty"),
        ("binary.sh", bytes(range(256)), "must be text in UTF-8"),
        ("zeros.sh", b"--bf16 \0", "must be text in UTF-8"),
        ("prose.txt", b"Dear all, please find enclosed\n", "must be a launch file"),
        ("other.sh", b"ls -l --color=auto\n", "holds no launch"),
        ("bad.json", b'{"a": 1,\n "b": }', "bad.json:2: must be JSON"),
        ("bad.toml", b"[training]\nseq_len = = 3\n", "bad.toml:2: must be TOML"),
        ("bad.yaml", b"model:\n  a: [1, 2\n  b: 3\n", "bad.yaml:3: must be YAML"),
        ("bad.py", b"cfg.model.tp = 1\ncfg.model.pp = = 2\n", "bad.py:2: must be Python"),
        ("config.json", b'{"model_type": "llama"}', "a config.json of Hugging Face goes to --model"),
        ("other.toml", b"[project]\nname = 'x'\n", "must have keys of TorchTitan, but has project"),
        ("space.yaml", b"model: llama3_8b\nstrategy: {tp: 2}\n", "is a configuration already"),
        ("none.yaml", b"kind: Pod\nspec: {a: 1}\n", "must have sections of Megatron-Bridge or NeMo"),
        (
            "tp.toml",
            b"[parallelism]\ntensor_parallel_degree = 'two'\n",
            "tp.toml:2: parallelism.tensor_parallel_degree",
        ),
        ("tp.yaml", b"model:\n  tensor_model_parallel_size: two\n", "tp.yaml:2: model.tensor_model_parallel_size"),
        ("zero.json", b'{"train_batch_size": 8,\n"zero_optimization": {"stage": 4}}', "zero.json:2: zero_optimization"),
        ("both.json", b'{"bf16": {"enabled": true},\n"fp16": {"enabled": true}}', "exclude one another"),
        ("bomb.yaml", b"a: &a [1,1]\nb: &b [*a,*a]\nmodel: {x: &m {y: *b}, z: *m, w: 2\n", "must be YAML"),
        ("deep.json", b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested too deep"),
        ("deep.sh", b"run --bf16 " + b"${A:-" * 3000 + b"}" * 3000, "nested too deep"),
    ],
)
def test_what_is_no_launch_file_is_one_line(name, content, told, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(content)
    assert told in refused(capsys, path)


def test_a_missing_file_and_a_folder_are_one_line(tmp_path, capsys):
    assert "cannot read" in refused(capsys, tmp_path / "gone.sh")
    assert "cannot read" in refused(capsys, tmp_path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", "llama9"], "neither a known name nor a file"),
        (["--system", "dgx_h900"], "dgx_h900"),
        (["--define", "8=TP"], "must be NAME=VALUE"),
        (["--define", "TQ=8"], "--define TQ: "),
        (["--define", "TP=2", "--define", "GPU=8"], "must read a variable of that name, but it reads TP"),
        (["--set", "strategy.tp"], "must be KEY=VALUE"),
        (["--set", "strategy.tpp=4"], "did you mean 'tp'?"),
        (["--set", "foo.bar=1"], "--set foo.bar=1: unknown key 'foo'; accepted keys of model, system, workload"),
        (["--args", "gone.txt"], "--args gone.txt: must be a readable script"),
        (["--against", "gone"], "is no run"),
    ],
)
def test_an_option_that_is_wrong_is_one_line(options, told, tmp_path, capsys):
    path = tmp_path / "job.sh"
    path.write_text(f"torchrun --nproc_per_node 8 x.py {ARGUMENTS} --bf16 --tensor-model-parallel-size ${{TP:-1}}\n")
    assert told in refused(capsys, path, *([] if "--system" in options else ["--system", "dgx_h100"]), *options)


def test_an_import_and_an_export_replace_no_file(tmp_path, capsys):
    path, mine = tmp_path / "job.sh", tmp_path / "mine.yaml"
    path.write_text(f"torchrun --nproc_per_node 8 x.py {ARGUMENTS}\n")
    mine.write_text("edited by hand")
    for target in (path, mine):
        before = target.read_text()
        for words in (["import", str(path)], ["export", "llama3_70b:rule_of_thumb", "--to", "megatron-lm"]):
            assert main([*words, "-o", str(target)]) == 2
            told = capsys.readouterr().err
            assert re.search(rf"{target}: (an output )?must not replace (a file that exists|the input)", told)
            assert told.count("\n") == 1
            assert target.read_text() == before


def test_what_has_no_effect_is_told_and_written_as_off(tmp_path, capsys):
    """A space would fold it; a configuration that is made from a file is written as a search would write it."""
    path, mine = tmp_path / "job.sh", tmp_path / "mine.yaml"
    path.write_text(f"torchrun --nproc_per_node 8 x.py {ARGUMENTS} --sequence-parallel --cp-comm-type a2a --bf16\n")
    assert main(["import", str(path), "--system", "dgx_h100", "-o", str(mine)]) == 0
    told = capsys.readouterr().err.splitlines()
    assert "sequence_parallel: true has no effect where tp is 1" in told
    assert "context_parallel: ulysses has no effect where cp is 1" in told
    strategy = yaml.safe_load(mine.read_text())["strategy"]
    assert (strategy["sequence_parallel"], strategy["context_parallel"]) == (False, "ring")
    assert "fused_softmax" not in strategy["fusion"]  # flash attention has no softmax of its own
    assert "fused_dropout" in strategy["fusion"]  # Megatron's dropout of 0.1
    assert main(["estimate", str(mine)]) in (0, 3)
    assert "has no effect" not in capsys.readouterr().err


def test_names_on_no_list_are_told_wherever_the_configuration_goes(tmp_path, capsys):
    path = tmp_path / "job.sh"
    path.write_text(f"torchrun --nproc_per_node 8 x.py {ARGUMENTS} --bf16 --frobnicate 3 --sequence-paralel\n")
    for options in ([], ["--json"], ["-o", str(tmp_path / "mine.yaml")]):
        assert main(["import", str(path), "--system", "dgx_h100", *options]) == 0
        (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("unknown: "))
        assert "--frobnicate, --sequence-paralel: not among the names of megatron-lm here" in line


def test_an_argument_that_is_given_twice_counts_as_given_last_and_is_told(tmp_path, capsys):
    path = tmp_path / "job.sh"
    path.write_text(f"torchrun --nproc_per_node 8 x.py {ARGUMENTS} --micro-batch-size 1 --micro-batch-size 2\n")
    found = imported(capsys, path)
    assert found["config"]["strategy"]["micro_batch"] == 2
    assert any("--micro-batch-size is given twice" in line for line in found["assumed"])


def test_gpus_that_the_degrees_do_not_divide_are_one_line(tmp_path, capsys):
    path = tmp_path / "job.sh"
    path.write_text(f"torchrun --nproc_per_node 6 x.py {ARGUMENTS} --tensor-model-parallel-size 4\n")
    assert "GPUs (6) must be divisible by tp 4 * cp 1 * pp 1" in refused(capsys, path)


def test_two_launches_in_one_script_are_one_line(tmp_path, capsys):
    path = tmp_path / "two.sh"
    path.write_text(f"torchrun x.py {ARGUMENTS}\ntorchrun y.py {ARGUMENTS}\n")
    assert "must launch one job, but lines 1, 2" in refused(capsys, path)


def test_a_word_that_may_hold_arguments_is_named(tmp_path, capsys):
    path = tmp_path / "open.sh"
    path.write_text(f"torchrun --nproc_per_node 8 x.py {ARGUMENTS} $MORE\n")
    found = imported(capsys, path)
    assert found["unknown"] == ["$MORE"]
    assert any("$MORE" in line and "--define MORE=VALUE" in line for line in found["missing"])


def test_arguments_alone_are_a_launch_file_one_a_line_or_all_in_one(tmp_path, capsys):
    for text in (ARGUMENTS, ARGUMENTS.strip().replace(" --", "\n--")):
        path = tmp_path / "arguments.txt"
        path.write_text(text)
        assert imported(capsys, path, "--gpus", "8")["config"]["model"]["num_layers"] == 8


def test_a_deepspeed_json_takes_its_arguments_from_the_command_line_or_from_beside_it(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}')
    launch = f"deepspeed --num_gpus 8 x.py {ARGUMENTS} --tensor-model-parallel-size 2 --deepspeed_config ds.json"
    told = imported(capsys, path, "--args", launch)
    (tmp_path / "run.sh").write_text(launch)
    beside = imported(capsys, path)
    for found in (told, beside):
        assert found["config"]["strategy"]["tp"] == 2
        assert found["num_gpus"] == 8
        assert found["config"]["workload"] == {"seq": 128, "global_batch": 64}


def test_json_and_arguments_of_deepspeed_must_agree(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 64}')
    err = refused(capsys, path, "--args", f"deepspeed --num_gpus 8 x.py {ARGUMENTS} --global-batch-size 32")
    assert "train_batch_size (64) must be --global-batch-size (32)" in err


NEMO = """
trainer:
  devices: 8
  num_nodes: 4
  precision: bf16-mixed
model:
  micro_batch_size: 1
  global_batch_size: 128
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 3
  encoder_seq_length: 2048
  sequence_parallel: true
  activations_checkpoint_granularity: selective
exp_manager: {name: x}
frobnicate: {a: 1}
"""


def test_a_recipe_of_nemo_is_read_by_its_own_names(tmp_path, capsys):
    path = tmp_path / "nemo.yaml"
    path.write_text(NEMO)
    found = imported(capsys, path, "--model", "llama3_70b")
    within(
        {
            "framework": "nemo",
            "num_gpus": 32,
            "unknown": ["frobnicate.a"],
            "config": {
                "model": "llama3_70b",
                "workload": {"seq": 2048, "global_batch": 128},
                "strategy": {"tp": 4, "pp": 2, "vpp": 3, "schedule": "interleaved", "precision": "bf16",
                             "recompute": "core_attn", "sequence_parallel": True},
            },
        },
        found,
    )  # fmt: skip


RECIPE = """
def small_config():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("x/y").to_megatron_provider(load_weights=False)
    cfg.tokenizer.vocab_size = DEFAULT
    cfg.dataset.seq_length = 8192
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_layout = None
    cfg.model.attention_backend = None
    cfg.model.cuda_graph_impl = "none"
    cfg.model.cuda_graph_scope = "full"
    cfg.model.cross_entropy_loss_fusion = True
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    cfg.mixed_precision = bf16_with_fp8_current_scaling_mixed()
    cfg.optimizer.exp_avg_dtype = torch.float32
    cfg.ddp.use_distributed_optimizer = True
    cfg.ddp.use_megatron_fsdp = False
    cfg.ddp.data_parallel_sharding_strategy = "no_shard"
    cfg.ddp.grad_reduce_in_fp32 = False
    cfg.frobnicate.a = 1
    return cfg
"""


def test_a_recipe_in_python_is_read_by_its_assignments(tmp_path, capsys):
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    options = ["--model", "llama3_8b", "--gpus", "16", "--system", "dgx_h100"]
    found = imported(capsys, path, *options)
    within(
        {
            "framework": "megatron-bridge",
            "unknown": ["cfg.frobnicate.a"],
            "unmodelled": [],
            "missing": [],
            "config": {
                "workload": {"seq": 8192, "global_batch": 512},
                "strategy": {"tp": 2, "precision": "fp8_bf16_grads", "zero_stage": 1, "optimizer": "adam",
                             "cuda_graph": "none"},
            },
        },
        found,
    )  # fmt: skip
    assert "fused_loss" in found["config"]["strategy"]["fusion"]
    path.write_text(RECIPE + RECIPE.replace("small", "large"))
    assert "must hold one recipe, but holds 2 (small_config, large_config)" in refused(capsys, path, *options)


def test_a_run_tells_where_the_job_stands_and_what_its_best_would_change(tmp_path, capsys):
    run = tmp_path / "run"
    space = tmp_path / "space.yaml"
    space.write_text(
        "model: llama3_8b\nsystem: {cluster: dgx_h100, num_chips: 16}\nworkload: {seq: 8192, global_batch: 64}\n"
        "strategy: {tp: [1, 2, 4], sequence_parallel: true, zero_stage: [1, 3], recompute: [none, full]}\n"
    )
    assert main(["launch", str(space), "--pool", "inline", "--replay", "0", "--out", str(run)]) == 0
    job = tmp_path / "job.sh"
    job.write_text(
        "torchrun --nproc_per_node 8 --nnodes 2 x.py --seq-length 8192 --micro-batch-size 1 --global-batch-size 64 "
        "--tensor-model-parallel-size 8 --sequence-parallel --bf16 --use-distributed-optimizer "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1\n"
    )
    capsys.readouterr()
    options = [str(job), "--model", "llama3_8b", "--system", "dgx_h100", "--against", str(run)]
    assert main(["import", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    changed = {change["name"]: (change["job"], change["best"]) for change in found["changes"]}
    assert changed["--recompute-granularity"] == ("full", "-")
    assert changed["--tensor-model-parallel-size"][0] == "8"
    assert found["b"]["step_time_s"] < found["a"]["step_time_s"]
    assert found["job"]["dominated_by"] == []  # nothing on the front is as small
    for framework in ("megatron-lm", "megatron-bridge", "torchtitan", "deepspeed"):
        best = f"{run}:{found['best']['id']}"
        sharded = ["--set", "strategy.zero_stage=3"] if framework == "torchtitan" else []
        assert main(["export", best, "--to", framework, "-o", str(tmp_path / framework), *sharded]) == 0
        back = imported(capsys, tmp_path / framework, "--model", "llama3_8b")
        assert back["config"]["strategy"]["tp"] == found["b"]["strategy"]["tp"]
        assert back["num_gpus"] == 16
    terms = [row["difference_s"] for row in found["waterfall"]]
    assert sum(terms[:-1]) == pytest.approx(terms[-1], rel=1e-9)  # fifteen additions
    job.write_text(
        job.read_text().replace("size 8 ", "size 2 ").replace("--bf16", "--bf16 --attention-backend unfused")
    )
    assert main(["import", *options]) == 0
    out = capsys.readouterr().out
    assert "better in step_time_s and peak_memory_bytes: 3 of 5 points" in " ".join(out.split())
    assert "what B would change, in the words of megatron-lm" in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 100
