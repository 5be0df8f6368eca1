"""What a run takes, before it is launched."""

import importlib
import json
import pkgutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import strata_platform
from strata_kernels.ops.lora.low_rank import LARGEST
from strata_kernels.patch.table import ACTIVATIONS
from strata_platform.errors import SpecError
from strata_platform.estimate import GPUS, cheapest, estimate, layouts, parse_prices, shape_of, workload
from strata_platform.estimate.config_shapes import from_config
from strata_platform.estimate.memory import activations_of_layer, kept_by_layer, moment_bytes, working_set
from strata_platform.estimate.shapes import KNOWN, ModelShape
from strata_platform.estimate.workload import Workload
from strata_platform.spec import RunSpec, load_spec
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.models.build import build_model
from tasks.runtime.models.config import PRESETS
from tasks.runtime.optim.optimizer import build_optimizer

# By its name: a package may have an attribute of that name that is no module.
estimate_package = importlib.import_module("strata_platform.estimate")
ROOT = Path(__file__).parents[3]
H200, GIB = GPUS["h200"], 2**30
EXAMPLE = ROOT / "examples/llama-3.1-8b-sft.yaml"


LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
SMALL = {"model_type": "llama", **PRESETS["tiny-llama"], "head_dim": None}


def spec_of(**sections):
    base = {"model": {"name": "meta-llama/Llama-3.1-8B", "dtype": "bfloat16"}, "data": {"sequence_length": 4096}}
    return RunSpec.model_validate(base | sections)


def work_of(**sections):
    spec = spec_of(**sections)
    return Workload.of(spec, shape_of(spec.model.name))


def take(**sections):
    spec = spec_of(**sections)
    return estimate(spec, shape_of(spec.model.name), H200)


def test_what_the_gate_lets_through_is_kept_where_it_is_not_fused():
    """Of each token and layer, 14336 numbers of two bytes. Adapters are fused with it where all of them are alike."""
    between = 2 * 8 * 2048 * 14336 * 32
    training = {"training": {"micro_batch_size": 8}, "data": {"sequence_length": 2048}}
    fused = take(**training).memory.activations
    apart = take(**training, kernels={"exclude": ["swiglu"]}).memory.activations
    assert apart - fused == between
    for adapter in ({}, {"lora_dropout": 0.1}, {"target_modules": ".*q_proj"}, {"r": 128}, {"use_dora": True}):
        lora = {**training, "adapter": {"type": "lora", **adapter}}
        apart = take(**lora, kernels={"exclude": ["swiglu"]}).memory.activations
        assert apart - take(**lora).memory.activations == (0 if adapter else between)


def test_the_estimate_knows_what_the_kernel_layer_fuses():
    """The platform cannot import it."""
    assert frozenset(ACTIVATIONS) == workload._ACTIVATIONS and workload._LARGEST_RANK == LARGEST


def test_the_estimate_of_adapters_is_near_what_was_measured():
    """Two rows of 4096 tokens on an H200: docs/benchmarks/lora.md."""
    lora = take(adapter={"type": "lora"}, training={"micro_batch_size": 2}, data={"sequence_length": 4096})
    assert lora.memory.peak / 2**30 == pytest.approx(43.0, rel=0.05)
    assert lora.tokens_per_second == pytest.approx(16450, rel=0.1)


@pytest.mark.parametrize(
    ("sections", "measured"),
    [
        ({}, 105_700),
        ({"adapter": {"type": "lora"}}, 118_500),
        ({"adapter": {"type": "lora", "lora_dropout": 0.05}}, 93_600),
        ({"training": {"micro_batch_size": 2, "gradient_accumulation_steps": 32}}, 104_100),
    ],
)
def test_the_estimate_of_a_small_model_is_near_what_was_measured(sections, measured):
    """Two rows of 2048 tokens on an H200, with CUDA graphs: docs/benchmarks/small-models.md."""
    small = {"model": {"name": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"}, "data": {"sequence_length": 2048}}
    found = take(**{"training": {"micro_batch_size": 2}, **small, **sections})
    assert found.tokens_per_second == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("kind", "masks"), [("none", 32), ("selective", 16 + 1), ("full", 1)])
def test_layers_that_are_kept_have_masks_of_their_own(kind, masks):
    """Numbers of four bytes for each pair of tokens of a row, and booleans once; and keys and values for each head."""
    training = {"training": {"micro_batch_size": 4, "gradient_checkpointing": kind}}
    exact = {**training, "model": {"name": "meta-llama/Llama-3.1-8B", "dtype": "float32"}}
    masked, apart = (
        take(**exact, data={"sequence_length": 4096, "packing": packing}).memory.activations
        for packing in (True, False)
    )
    repeated = 4 * 4096 * 2 * (4096 - 1024)
    assert masked - apart == 4 * (4 * 4096**2 + repeated) * masks + 4 * 4096**2


def test_gradients_of_many_micro_batches_are_added_in_float32():
    """In four bytes per weight instead of two, which exist while a micro-batch computes."""
    recomputed = {"micro_batch_size": 1, "gradient_checkpointing": "full"}
    few, many = (take(training={**recomputed, "gradient_accumulation_steps": steps}) for steps in (16, 17))
    rounded = take(
        training={**recomputed, "gradient_accumulation_steps": 17, "gradient_accumulation_dtype": "bfloat16"}
    )
    assert rounded.memory == few.memory
    assert rounded.memory.gradients == rounded.memory.weights and many.memory.gradients == 2 * many.memory.weights
    assert many.time.optimizer > rounded.time.optimizer
    exact = {"model": {"name": "meta-llama/Llama-3.1-8B", "dtype": "float32"}}
    few, many = (take(**exact, training={**recomputed, "gradient_accumulation_steps": steps}) for steps in (16, 17))
    assert many.memory == few.memory


def test_attention_by_document_has_no_masks():
    packed, apart = (take(data={"sequence_length": 4096, "packing": packing}) for packing in (True, False))
    assert packed.memory == apart.memory and packed.time == apart.time


def test_recomputation_ends_before_the_last_projection():
    """Of Llama 3.1 8B's layers 27 % of the weights: not of adapters, whose own part comes behind it."""
    plain, again = (
        take(training={"micro_batch_size": 1, "gradient_checkpointing": kind}).time.products
        for kind in ("none", "full")
    )
    layer, last = 218_103_808, 4096 * 14336
    assert again / plain == pytest.approx(
        (32 * (4 * layer - last) + 3 * 4096 * 128256) / (32 * 3 * layer + 3 * 4096 * 128256), rel=1e-3
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8.030),
        ("NousResearch/Meta-Llama-3.1-8B", 8.030),
        ("meta-llama/Meta-Llama-3-70B", 70.554),
        ("mistralai/Mistral-7B-Instruct-v0.2", 7.242),
        ("mistralai/Mistral-7B-v0.1", 7.242),
        ("Qwen/Qwen2-0.5B-Instruct", 0.494),
        ("Qwen/Qwen2-7B", 7.616),
        ("Qwen/Qwen3-4B", 4.022),
        ("Qwen/Qwen3-4B-Instruct-2507", 4.022),
        ("HuggingFaceTB/SmolLM2-135M", 0.1345),
    ],
)
def test_known_models_have_their_published_sizes(name, billions):
    assert shape_of(name).parameters / 1e9 == pytest.approx(billions, abs=5e-4)


def test_the_preset_is_the_one_that_is_trained():
    assert from_config({"model_type": "llama", **PRESETS["tiny-llama"]}) == KNOWN["tiny-llama"]


def test_a_folder_speaks_for_itself(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **PRESETS["tiny-llama"]}))
    assert shape_of(str(tmp_path)) == shape_of("x/unknown", tmp_path / "config.json") == KNOWN["tiny-llama"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported by the estimate; supported: llama, "),
        ({"model_type": "llama", "num_attention_heads": 4}, "has no 'hidden_size'"),
        ({**SMALL, "num_attention_heads": 0}, "num_attention_heads is 0, not a whole number from 1 to 100000"),
        ({**SMALL, "vocab_size": None}, "vocab_size is null, not a whole number"),
        ({**SMALL, "num_hidden_layers": 1.5}, "num_hidden_layers is 1.5, not"),
        ({**SMALL, "num_attention_heads": 512}, "num_attention_heads 512 does not divide hidden_size 256"),
        ({**SMALL, "head_dim": "64"}, 'head_dim is "64", not'),
        ("{", "Expecting property name"),
    ],
)
def test_a_configuration_that_does_not_tell(tmp_path, config, said):
    file = tmp_path / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(SpecError, match=r"model\.name") as caught:
        shape_of("x", file)
    assert said in str(caught.value) and str(file) in str(caught.value)


def test_an_unknown_model_names_the_way_out():
    with pytest.raises(SpecError, match=r"model\.name: is neither a folder.*--config.*allowed: .*llama-3\.1-8b"):
        shape_of("meta-llama/Llama-9")


def test_the_example_takes_what_it_took():
    """67.3 GiB on an H200 without master weights (docs/benchmarks/training.md); their low bits take 2 bytes."""
    spec = load_spec(EXAMPLE)
    shape = shape_of(spec.model.name)
    found = estimate(spec, shape, H200)
    assert found.memory.peak / GIB == pytest.approx(67.3 + 2 * shape.parameters / GIB, rel=0.05)
    assert found.fits


def test_parts_follow_the_spec():
    plain = take().memory
    assert plain.weights == plain.optimizer / 3 == 2 * shape_of("llama-3.1-8b").parameters
    for precision in ("stochastic_rounding", "nearest"):
        assert take(optimizer={"precision": precision}).memory.optimizer == 2 * plain.weights
    split = take(parallel={"type": "fsdp"}, topology={"nproc_per_node": 4}).memory
    assert (split.weights, split.optimizer) == (plain.weights / 4, plain.optimizer / 4)
    assert split.gathered > 0 == plain.gathered
    copied = take(parallel={"type": "ddp"}, topology={"nproc_per_node": 4}).memory
    assert copied.weights == plain.weights and copied.gradients == plain.weights
    adapted = take(adapter={"type": "lora"}).memory
    assert adapted.optimizer < 0.02 * plain.optimizer and adapted.weights > plain.weights
    assert take(model={"name": "llama-3.1-8b", "dtype": "float32"}).memory.optimizer == 4 * plain.weights


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_moments_of_eight_bits_are_those_of_rows_of_whole_blocks(dtype):
    def moments(name, type, **fields):
        return take(
            model={"name": name, "dtype": dtype}, optimizer={"type": type, "precision": "nearest"}, **fields
        ).memory.optimizer

    shape = shape_of("llama-3.1-8b")
    assert moments("llama-3.1-8b", "adamw_8bit") == pytest.approx(
        2 * (1 + 4 / 256) * (shape.parameters - shape.head_parameters)
        + 2 * (2 if dtype == "bfloat16" else 4) * shape.head_parameters,
        rel=1e-3,
    )
    # All rows are 896 long, but for those of the projection from 4864.
    few = shape_of("qwen2.5-0.5b")
    saved = moments("qwen2.5-0.5b", "adamw") - moments("qwen2.5-0.5b", "adamw_8bit")
    packed = few.layers * few.hidden * few.intermediate
    assert saved == pytest.approx(2 * packed * ((2 if dtype == "bfloat16" else 4) - 1 - 4 / 256))
    split = {"parallel": {"type": "fsdp"}, "topology": {"nproc_per_node": 4}}
    assert moments("llama-3.1-8b", "adamw_8bit", **split) == moments("llama-3.1-8b", "adamw_8bit") / 4


NF4 = {"adapter": {"type": "lora", "quantization": "nf4"}}
LAYER = 218_103_808


def on(processes, **parallel):
    return {"topology": {"nproc_per_node": processes}, "parallel": {"type": "fsdp", **parallel}}


TENSOR, CONTEXT = on(2, tensor_parallel=2), on(2, context_parallel=2)


def test_weights_of_four_bits_are_those_of_linear_layers_and_their_scales():
    """A byte for 64 weights, and four for 256 of those bytes: FSDP splits weights, not scales."""
    count = 32 * LAYER
    scales = count / 64 + 4 * count / 64 / 256
    exact, packed = take(adapter={"type": "lora"}).memory, take(**NF4).memory
    assert exact.weights - packed.weights == count * 2 - (count / 2 + scales)
    split = take(**NF4, **on(4)).memory
    assert split.weights == (packed.weights - scales) / 4 + scales
    assert (packed.optimizer, packed.loss) == (exact.optimizer, exact.loss)
    # Two layers, with norms as they are, and what is beside them.
    assert split.gathered == 2 * (LAYER / 2 + 2 * 4096 * 2) + 2 * (2 * 4096 * 128256 + 4096)


def test_weights_of_no_whole_blocks_stay_as_they_are():
    """Of the queries, and behind attention; keys and values have 32 weights, those of the gate 96."""
    assert Workload.of(spec_of(**NF4), ModelShape(8, 12, 1, 2, 1, 4, 100)).nf4_weights == (64, 64)


def test_one_weight_of_four_bits_is_exact_while_it_is_multiplied_with():
    exact = working_set(work_of(adapter={"type": "lora"}))
    assert working_set(work_of(**NF4)) - exact == 2 * 4096 * 14336


def test_every_product_unpacks_its_weight_once():
    """Forward and backward, and once more where it is computed again: half a byte is read, two are written."""
    lora = {"adapter": {"type": "lora"}}
    outputs = 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096
    for kind, passes in (("none", 2), ("full", 3)):
        training = {"training": {"gradient_checkpointing": kind, "micro_batch_size": 1}}
        more = take(**NF4, **training).time.elementwise - take(**lora, **training).time.elementwise
        # PEFT's copy of what a forward pass gives: two bytes are read, two are written.
        copied = 4096 * outputs * 4 * (passes - 1)
        assert more == pytest.approx(32 * (LAYER * 2.5 * passes + copied) / H200.stream)


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_cut_matrices_are_split_like_others_but_for_norms(processes):
    norms = 65 * 4096
    cut = take(**on(processes, tensor_parallel=2)).memory
    assert cut.weights == 2 * ((8_030_261_248 - norms) / processes + norms / (processes / 2))
    assert cut.optimizer == 3 * cut.weights


def test_hidden_states_are_whole_where_matrices_are_cut():
    """What goes into norms and out of them; heads and columns are divided."""
    work = work_of(**TENSOR, training={"micro_batch_size": 1})
    heads, columns = 2 * 4096 + 2 * 1024, 2 * 14336
    assert activations_of_layer(work) == 2 * 4096 * (4 * 4096 + (heads + columns) // 2)
    assert (work.shape.layer_weights, work.shape.head_parameters, work.shards) == (LAYER // 2, 4096 * 64128, 1)
    assert take(**TENSOR).memory.gathered == pytest.approx(take(**on(2)).memory.gathered / 2, rel=1e-3)


def test_an_uneven_vocabulary_is_counted_by_its_largest_part():
    assert ModelShape(8, 12, 1, 2, 2, 4, 101).part(2).vocabulary == 51


def test_logits_are_whole_where_the_loss_is_not_fused():
    def logits(spec):
        return take(**spec, kernels={"exclude": ["linear_cross_entropy"]}).memory.loss

    assert logits(TENSOR) == logits(on(2))
    assert take(**TENSOR).memory.loss < take(**on(2)).memory.loss
    assert logits(CONTEXT) == logits(on(2)) / 2


@pytest.mark.parametrize(("kind", "sums"), [("none", 4 * 32 + 2), ("full", 5 * 32 + 2), ("selective", 4.5 * 32 + 2)])
def test_sums_of_hidden_states_are_waited_for(kind, sums):
    """Four for a layer, a fifth where it is recomputed, one behind the embeddings, one before the head."""
    training = {"training": {"gradient_checkpointing": kind, "micro_batch_size": 2, "gradient_accumulation_steps": 3}}
    # Two processes have nothing left to split: each sends half of a sum, and half of what it comes to. FSDP makes its
    # messages all the same, of half of the weights: those of layers twice, the others once, and of gradients.
    learns = take(**TENSOR).memory.weights / 2
    copied = 2 * (2 * 32 * 2 * LAYER / 2 + 2 * (learns - 32 * LAYER / 2)) + learns * (2 + 4)
    sent = sums * 2 * 4096 * 4096 * 2 / H200.link
    assert take(**TENSOR, **training).time.waiting == pytest.approx(3 * (sent + copied / H200.stream), rel=1e-3)


def test_nothing_hides_the_first_weights_nor_the_last_gradients():
    """What no layer has is gathered before the first one, and its gradients are summed behind the last one."""
    root = 2 * 4096 * 128256 + 4096
    alone, layers = root * (2 + 4) / 2, (8_030_261_248 - root) * (2 * 2 + 4) / 2
    copied = 2 * 2 * (2 * (8_030_261_248 - root) + root) + 8_030_261_248 * (2 + 4)
    expected = (alone + 0.15 * layers) / H200.link + copied / H200.stream
    assert take(**on(2)).time.waiting == pytest.approx(expected, rel=1e-3)


def test_keys_and_values_of_cut_rows_are_whole():
    """Tokens are divided. A layer has three times the width of the heads, and no mask of pairs."""
    layer = 2 * (4096 * (7 * 4096 + 2 * 14336) + 2 * 2 * 4096 * 1024)
    training = {"training": {"micro_batch_size": 2}}
    assert take(**CONTEXT, **training).memory.activations == 32 * layer
    recomputed = {"training": {"micro_batch_size": 2, "gradient_checkpointing": "full"}}
    assert kept_by_layer(work_of(**CONTEXT, **recomputed)) == 2 * 4096 * 4096


@pytest.mark.parametrize(("kind", "times"), [("none", 2), ("full", 3)])
def test_keys_and_values_of_cut_rows_are_waited_for(kind, times):
    """Each process sends its own to the others; and FSDP splits over all of them as it does without."""
    training = {"training": {"gradient_checkpointing": kind, "micro_batch_size": 2, "gradient_accumulation_steps": 2}}
    four, sent = on(4, context_parallel=4), 2 * 4096 // 4 * 2 * 1024 * 2 * 3
    cut = take(**four, **training)
    assert cut.time.waiting >= 2 * 32 * times * sent / H200.link
    plain = take(**on(4), **training)
    assert (cut.memory.weights, cut.memory.gathered) == (plain.memory.weights, plain.memory.gathered)
    assert cut.time.products == pytest.approx(plain.time.products / 4)


def test_heads_are_exchanged_for_slices_of_rows_where_that_sends_less():
    """By eight processes, not by four; a rank has 4 of 32 heads, and 1 of 8 of keys, over the whole row."""
    training = {"training": {"micro_batch_size": 2}}

    def sent(processes, method):
        cut = on(processes, context_parallel=processes, context_parallel_method=method)
        return take(**cut, **training).time.waiting

    for processes, cheaper in ((4, "all_gather"), (8, "ulysses")):
        assert sent(processes, "auto") == min(sent(processes, m) for m in ("all_gather", "ulysses"))
        assert sent(processes, "auto") == sent(processes, cheaper)
    work = work_of(**on(8, context_parallel=8), **training)
    assert activations_of_layer(work) == 2 * 4096 // 8 * (7 * 4096 + 2 * 14336 + 2 * 1024) * 2


def test_heads_that_processes_cannot_share_are_refused():
    with pytest.raises(SpecError, match=r"parallel\.context_parallel_method: 'ulysses' divides heads over 3 processes"):
        work_of(**on(3, context_parallel=3, context_parallel_method="ulysses"), data={"sequence_length": 3072})


def test_layers_that_are_all_kept_are_refused():
    training = {"gradient_checkpointing": "full", "gradient_checkpointing_except_last": 32}
    with pytest.raises(SpecError, match=r"except_last: 32 leaves none of the model's 32 layers"):
        work_of(training=training)


def test_rows_that_are_cut_have_masks_in_float32():
    model = {"name": "llama-3.1-8b", "dtype": "float32"}
    work = work_of(**CONTEXT, model=model, training={"micro_batch_size": 1})
    # Keys and values are repeated for the heads; a token sees half of the row on average.
    numbers = 2048 * (7 * 4096 + 2 * 14336) + 2 * 4096 * 4096 + 2048 * 4096 // 2
    assert activations_of_layer(work) == 4 * numbers


@pytest.mark.parametrize("cut", [TENSOR, CONTEXT], ids=["matrices", "rows"])
def test_a_group_counts_its_rows_once(cut):
    found = take(**cut, training={"micro_batch_size": 2, "gradient_accumulation_steps": 2})
    assert found.tokens_per_second * found.time.step == pytest.approx(2 * 2 * 4096 / 2)
    assert 0 < found.mfu < 1


def test_a_model_that_cannot_be_cut_is_refused():
    with pytest.raises(SpecError, match=r"parallel\.tensor_parallel: 3 does not divide num_attention_heads 32 of"):
        take(**on(3, tensor_parallel=3))
    with pytest.raises(SpecError, match=r"16 does not divide num_key_value_heads 8"):
        take(**on(16, tensor_parallel=16))


MIXTURE = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
           "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "moe_intermediate_size": 768,
           "num_experts": 128, "num_experts_per_tok": 8}  # fmt: skip
# Of a layer of it.
EXPERTS = 128 * 3 * 2048 * 768


def of_mixture(**sections):
    sections["training"] = {"micro_batch_size": 1, **sections.get("training", {})}
    return Workload.of(spec_of(**sections), from_config(MIXTURE)), estimate(
        spec_of(**sections), from_config(MIXTURE), H200
    )


def test_a_mixture_on_one_gpu_is_as_it_was_measured():
    """One row of 4096 tokens, recomputed; docs/benchmarks/large-models.md has the command."""
    common = {"data": {"sequence_length": 4096}, "training": {"gradient_checkpointing": "full"}}
    _, lora = of_mixture(**common, adapter={"type": "lora", "target_parameters": ["gate_up_proj", "down_proj"]})
    assert lora.tokens_per_second == pytest.approx(16235, rel=0.1)
    assert lora.memory.peak / 2**30 == pytest.approx(63.5, rel=0.05)
    eight_bits = {"type": "adamw_8bit", "precision": "stochastic_rounding", "in_backward": True, "max_grad_norm": 0}
    # Where all layers are recomputed, the speed depends on the host, which is not modelled.
    for kept, tokens, gib in ((0, None, 118.3), (24, 10838, 123.4), (47, 11603, 129.1)):
        training = {"gradient_checkpointing": "full", "gradient_checkpointing_except_last": kept}
        _, whole = of_mixture(**{**common, "training": training}, optimizer=eight_bits)
        assert whole.memory.peak / 2**30 == pytest.approx(gib, rel=0.05)
        assert tokens is None or whole.tokens_per_second == pytest.approx(tokens, rel=0.1)


def test_long_rows_are_as_they_were_measured():
    """One row of the 8B model; docs/benchmarks/large-models.md has the command."""
    training = {"micro_batch_size": 1, "gradient_checkpointing": "full", "activation_offloading": True}
    # The one step of the second longest took a quarter of its time to allocate host memory, which is not modelled.
    for length, tokens, gib in ((32768, 6170, 67.3), (131072, None, 84.8), (262144, 1423, 114.1)):
        found = take(
            data={"sequence_length": length}, training=training, optimizer={"in_backward": True, "max_grad_norm": 0}
        )
        assert found.memory.peak / 2**30 == pytest.approx(gib, rel=0.06)
        assert tokens is None or found.tokens_per_second == pytest.approx(tokens, rel=0.1)


@pytest.mark.parametrize("ways", [2, 8])
def test_split_experts_are_gathered_in_part(ways):
    """Two layers are gathered at a time, and one has gradients that are not reduced: in bfloat16 and in fp32."""
    (_, whole), (_, split) = of_mixture(**on(8)), of_mixture(**on(8, expert_parallel=ways))
    elsewhere = EXPERTS * (1 - 1 / ways)
    assert whole.memory.gathered - split.memory.gathered == 2 * elsewhere * 2
    assert (split.memory.weights, split.memory.optimizer) == (whole.memory.weights, whole.memory.optimizer)
    assert split.time.products == whole.time.products


def test_layouts_keep_split_experts_and_do_without():
    found = list(layouts(spec_of(**on(4, expert_parallel=4)), from_config(MIXTURE), H200, 4))
    assert {(f.spec.topology.world_size, f.spec.parallel.expert_parallel) for f in found} == {
        (1, 1), (2, 1), (4, 1), (4, 4),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "said"), [(shape_of("llama-3.1-8b"), "the model has no experts"), (from_config(MIXTURE), "128 experts")]
)
def test_experts_that_cannot_be_split_are_refused(shape, said):
    with pytest.raises(SpecError, match=rf"parallel\.expert_parallel: .*{said}"):
        Workload.of(spec_of(**on(3, expert_parallel=3)), shape)


def test_tokens_of_a_group_are_held_and_sent():
    (whole, _), (split, found) = of_mixture(**on(8)), of_mixture(**on(8, expert_parallel=8))
    tokens = 4096 * 2048 * 2
    assert activations_of_layer(split) - activations_of_layer(whole) == 7 * tokens
    assert working_set(split) - working_set(whole) == 14 * tokens
    assert found.time.waiting > 48 * 4 * 7 * tokens / H200.link


def test_layouts_whose_moments_have_room_are_preferred():
    """Of a model with 30 GiB of moments: on a GPU of 60 they have none beside the rest of one process."""
    small = replace(H200, memory=60 * GIB)
    spec = spec_of(
        optimizer={"paged": True}, training={"gradient_accumulation_steps": 32, "gradient_checkpointing": "full"}
    )
    alone, best = estimate(spec, shape_of("llama-3.1-8b"), small), cheapest(spec, shape_of("llama-3.1-8b"), small)
    assert alone.fits and alone.memory.peak + alone.paged > 0.97 * small.memory
    assert best.memory.peak + best.paged <= 0.97 * small.memory


def test_moments_that_give_way_need_not_fit():
    split = {"parallel": {"type": "fsdp"}, "topology": {"nproc_per_node": 4}}
    for fields in ({}, split, {"adapter": {"type": "lora"}}):
        for type in ("adamw", "adamw_8bit"):
            ordinary = take(**fields, optimizer={"type": type})
            paged = take(**fields, optimizer={"type": type, "paged": True})
            assert paged.memory.optimizer == 0
            assert paged.memory.peak == pytest.approx(ordinary.memory.peak - ordinary.memory.optimizer)
            assert paged.time == ordinary.time
            assert f"optimizer.paged: {ordinary.memory.optimizer / GIB:.1f} GiB" in paged.uncounted[0]
            assert not ordinary.uncounted


REWARD = {"objective": {"type": "reward"}, "data": {"source": "a.jsonl", "sequence_length": 4096}}
KTO = {"objective": {"type": "kto"}, "data": {"source": "a.jsonl", "sequence_length": 4096}}


@pytest.mark.parametrize("name", ["tiny-llama", "meta-llama/Llama-3.1-8B"])
def test_a_reward_model_has_a_score_in_place_of_its_head(name):
    fields = {**PRESETS["tiny-llama"]} if name == "tiny-llama" else LLAMA_8B
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("llama", **fields, num_labels=1))
    found = take(**REWARD, model={"name": name, "dtype": "bfloat16"})
    assert found.shape.parameters == sum(weight.numel() for weight in model.parameters())
    assert found.memory.weights == 2 * found.shape.parameters


def test_a_reward_model_takes_no_memory_and_time_for_logits():
    reward, text = take(**REWARD), take()
    # The head's weights, gradients and AdamW's moments, and a second buffer that sums its gradient.
    assert text.memory.peak - reward.memory.peak > 4 * 2 * 128255 * 4096
    states = reward.workload.tokens * 4096 * 2
    assert states <= reward.memory.loss < 1.01 * states and reward.time.loss < 1e-3 * text.time.loss
    assert reward.tokens_per_second > text.tokens_per_second
    lora = take(**REWARD, adapter={"type": "lora"})
    assert not lora.uncounted and lora.underestimated_because is None


def test_passes_without_gradients_are_told():
    reference, others = take(**KTO).uncounted
    assert "the reference's forward pass" in reference and "a forward pass over prompts with other rows'" in others
    assert len(take(**{**KTO, "objective": {"type": "kto", "loss": "apo_zero_unpaired"}}).uncounted) == 1


RECOMPUTED = {"training": {"gradient_checkpointing": "full"}}


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (RECOMPUTED, {"training": {"gradient_checkpointing": "attention"}}),
        (RECOMPUTED, {"training": {**RECOMPUTED["training"], "gradient_checkpointing_except_last": 12}}),
        ({"training": {"gradient_checkpointing": "attention"}}, {"training": {"gradient_checkpointing": "selective"}}),
        ({"training": {"gradient_checkpointing": "selective"}}, {"training": {"gradient_checkpointing": "per_op"}}),
        ({"training": {"gradient_checkpointing": "per_op"}}, {}),
        ({"optimizer": {"type": "muon"}}, {}),
        ({"optimizer": {"type": "adamw_8bit"}}, {"optimizer": {"type": "muon"}}),
        ({**RECOMPUTED, "optimizer": {"in_backward": True, "max_grad_norm": 0}}, RECOMPUTED),
        ({"training": {"micro_batch_size": 2}}, {"training": {"micro_batch_size": 4}}),
        ({}, {"kernels": {"enabled": False}}),
        ({}, {"kernels": {"exclude": ["linear_cross_entropy"]}}),
        ({}, {"training": {"gradient_accumulation_steps": 2}}),
        (NF4, {"adapter": {"type": "lora"}}),
        ({**NF4, **on(2)}, NF4),
        ({**NF4, **CONTEXT}, {**NF4, **on(2)}),
        (TENSOR, on(2)),
        (CONTEXT, on(2)),
        (on(4, tensor_parallel=4), TENSOR),
        (on(4, tensor_parallel=2, context_parallel=2), TENSOR),
    ],
)
def test_what_takes_less_memory(less, more):
    assert take(**less).memory.peak < take(**more).memory.peak


@pytest.mark.parametrize(
    ("faster", "slower"),
    [
        ({}, {"training": {"gradient_checkpointing": "per_op"}}),
        ({"training": {"gradient_checkpointing": "per_op"}}, {"training": {"gradient_checkpointing": "selective"}}),
        ({"training": {"gradient_checkpointing": "selective"}}, {"training": {"gradient_checkpointing": "attention"}}),
        ({"training": {"gradient_checkpointing": "attention"}}, {"training": {"gradient_checkpointing": "full"}}),
        ({}, {"optimizer": {"type": "muon"}}),
        ({"optimizer": {"type": "adamw_8bit"}}, {}),
        ({}, {"kernels": {"enabled": False}}),
        ({"adapter": {"type": "lora"}}, {}),
        ({}, {"parallel": {"type": "ddp"}, "topology": {"nproc_per_node": 8}}),
        ({"training": {"gradient_accumulation_steps": 8}}, {}),
        ({"adapter": {"type": "lora"}}, NF4),
        (on(2), TENSOR),
        (on(2), CONTEXT),
        (TENSOR, on(4, tensor_parallel=4)),
    ],
)
def test_what_is_faster(faster, slower):
    assert take(**faster).tokens_per_second > take(**slower).tokens_per_second


def test_layouts_read_the_same_rows_and_the_cheapest_fits():
    spec = load_spec(EXAMPLE)
    shape = shape_of(spec.model.name)
    found = list(layouts(spec, shape, H200, 8))
    assert {other.spec.rows_per_step for other in found} == {32}
    assert {other.spec.topology.world_size for other in found} == {1, 2, 4, 8}
    best = cheapest(spec, shape, H200, 8)
    assert best.fits and best.tokens_per_second >= estimate(spec, shape, H200).tokens_per_second
    assert cheapest(spec, shape, GPUS["l40s"], 1) is None
    assert cheapest(spec, shape, GPUS["l40s"], 8).spec.parallel.type == "fsdp"


def test_the_layout_that_is_asked_about_is_one_of_them():
    """Three GPUs are what no other layout has; one and two are too few here."""
    fields = {"topology": {"nproc_per_node": 3}, "parallel": {"type": "fsdp"}}
    spec = RunSpec.model_validate({"model": {"name": "Qwen/Qwen2.5-14B"}, **fields})
    shape = shape_of(spec.model.name)
    assert next(layouts(spec, shape, GPUS["h100"], 3)).spec == spec
    assert cheapest(spec, shape, GPUS["h100"], 3).spec == spec


@pytest.mark.parametrize("cut", [{"tensor_parallel": 2}, {"context_parallel": 2}], ids=["matrices", "rows"])
def test_layouts_keep_what_is_cut_and_do_without(cut):
    training = {"training": {"micro_batch_size": 2, "gradient_accumulation_steps": 4}}
    spec = spec_of(**on(4, **cut, reduce_dtype="bfloat16"), **training)
    found = [other.spec for other in layouts(spec, shape_of("llama-3.1-8b"), H200, 8)]
    assert {other.rows_per_step for other in found} == {2 * 4 * 2}
    assert {other.topology.world_size for other in found} == {1, 2, 4, 8}
    assert {
        (parallel.type, parallel.tensor_parallel * parallel.context_parallel)
        for parallel in (other.parallel for other in found)
    } == {
        ("single", 1), ("ddp", 1), ("fsdp", 1), ("fsdp", 2),
    }  # fmt: skip
    assert {other.parallel.reduce_dtype for other in found if other.parallel.type == "fsdp"} == {"bfloat16"}


def test_layouts_keep_weights_of_four_bits():
    spec = spec_of(**NF4, training={"micro_batch_size": 4})
    found = list(layouts(spec, shape_of("llama-3.1-8b"), H200, 4))
    assert len(found) > 4 and {other.spec.adapter for other in found} == {spec.adapter}


def strata(*arguments):
    code = "from strata_platform.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "estimate", *map(str, arguments)], capture_output=True, text=True, timeout=600
    )


def test_what_a_person_reads_is_what_the_docs_show():
    ended = strata(EXAMPLE, "--tokens", "3e8", "--price", "3")
    assert (ended.returncode, ended.stderr) == (0, "")
    for said in ("8.03 B parameters", "weights         15.0", "fits, ", "hours for 300,000,000 tokens, ", "cheapest"):
        assert said in ended.stdout
    assert ended.stdout in (ROOT / "docs/estimate.md").read_text()


@pytest.mark.parametrize(
    ("sections", "part"),
    [
        ({"objective": {"type": "distill", "teacher": "org/teacher"}}, "objective.type 'distill': the teacher"),
        ({"objective": {"type": "dpo"}, "data": {"source": "pairs.jsonl"}}, "objective.type 'dpo': the reference"),
        (
            {"parallel": {"type": "fsdp", "cpu_offload": True}, "topology": {"nproc_per_node": 2}},
            "parallel.cpu_offload",
        ),
        ({"model": {"name": "meta-llama/Llama-3.2-1B", "dtype": "float32"}}, "model.dtype 'float32'"),
        (
            {"optimizer": {"paged": True}},
            "optimizer.paged: 6.9 GiB of optimizer state on each GPU, which move to the host",
        ),
        ({"adapter": {"type": "lora", "use_dora": True}}, "adapter.use_dora"),
        ({"adapter": {"type": "lora", "lora_dropout": 0.1}}, "adapter.lora_dropout"),
        ({"adapter": {"type": "lora", "target_modules": ["q_proj"]}}, "adapter.target_modules"),
        ({"adapter": {"type": "lora", "target_modules": r".*\.q_proj"}}, "adapter.target_modules"),
        ({"adapter": {"type": "lora", "target_parameters": ["down_proj"]}}, "adapter.target_parameters"),
    ],
)
def test_what_is_not_counted_is_said(sections, part, tmp_path):
    (tmp_path / "my.yaml").write_text(json.dumps({"model": {"name": "meta-llama/Llama-3.2-1B"}, **sections}))
    assert f"not counted: {part}" in strata(tmp_path / "my.yaml", "--gpu", "h200").stdout
    assert (
        part in json.loads(strata(tmp_path / "my.yaml", "--gpu", "h200", "--format", "json").stdout)["not_counted"][0]
    )


def test_what_a_program_reads():
    ended = strata(EXAMPLE, "--format", "json", "--gpu", "l40s")
    data = json.loads(ended.stdout)
    assert (ended.returncode, data["fits"]) == (1, False)
    assert data["memory"]["peak"] == sum(v for k, v in data["memory"].items() if k not in ("peak", "available"))
    assert data["cheapest"]["fits"] and data["cheapest"]["layout"]["parallel.type"] == "fsdp"
    assert "hours" not in data


def test_what_is_cut_and_packed_is_said(tmp_path):
    def said(**sections):
        (tmp_path / "my.yaml").write_text(json.dumps({"model": {"name": "llama-3.1-8b"}, **sections}))
        return strata(tmp_path / "my.yaml", "--gpu", "h200", "--gpus", "2").stdout

    assert "LoRA on nf4 weights, on 1 x H200" in said(**NF4)
    cut = said(**TENSOR)
    assert "layout: 2 GPUs, fsdp, tensor parallel 2, 4 x 256 tokens per micro-batch" in cut
    assert "context parallel 2" in said(**CONTEXT)
    data = json.loads(strata(tmp_path / "my.yaml", "--gpu", "h200", "--format", "json").stdout)
    assert (data["layout"]["parallel.tensor_parallel"], data["layout"]["parallel.context_parallel"]) == (1, 2)


def test_prices_come_from_a_table(tmp_path):
    (tmp_path / "prices.yaml").write_text("currency: USD\ngpus: {h200: 3.5, h100: 2}\n")
    arguments = (EXAMPLE, "--tokens", "3e8", "--prices", tmp_path / "prices.yaml")
    ended = strata(*arguments)
    assert (ended.returncode, ended.stderr) == (0, "") and " USD at 3.5 USD per GPU and hour" in ended.stdout
    data = json.loads(strata(*arguments, "--format", "json", "--gpu", "h100").stdout)
    assert (data["price"], data["currency"]) == (2, "USD")
    assert data["cost"] == pytest.approx(data["hours"] * 2)
    # What is said in the command is said last.
    assert " at 9 per GPU and hour" in strata(*arguments, "--price", "9").stdout
    ended = strata(*arguments, "--gpu", "b200")
    assert ended.returncode == 0 and "per GPU and hour" not in ended.stdout
    assert ended.stderr == f"WARNING: {tmp_path / 'prices.yaml'} has no price of b200; it has: h200, h100\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpus: {H200: 3}", "gpus.H200: not a known GPU; allowed: h200, h100, "),
        ("gpus: {h200: -3}", "gpus.h200: Input should be greater than or equal to 0"),
        ("gpus: {h200: .inf}", "gpus.h200: Input should be a finite number"),
        ("gpus: {h200: three}", "gpus.h200: Input should be a valid number"),
        ("h200: 3", "h200: Extra inputs are not permitted"),
        ("", "Input should be a valid dictionary"),
        ("{", "not valid YAML, column 2: "),
        ("currency: a\ncurrency: b", "currency (line 2): given twice, first in line 1"),
    ],
)
def test_a_table_that_is_none_is_refused_by_its_key(text, said):
    with pytest.raises(SpecError, match=r"^prices\.yaml has 1 problem:\n  ") as caught:
        parse_prices(text, "prices.yaml")
    assert said in str(caught.value)


def test_a_table_that_cannot_be_read_is_an_error(tmp_path):
    ended = strata(EXAMPLE, "--prices", tmp_path / "none.yaml")
    assert (ended.returncode, ended.stdout) == (2, "") and "cannot be read" in ended.stderr


def test_the_kind_of_gpu_is_the_one_that_the_spec_asks_for(tmp_path):
    def said(gpu_type):
        resources = {"gpu": 1, "gpu_type": gpu_type}
        (tmp_path / "my.yaml").write_text(json.dumps({"model": {"name": "llama-3.1-8b"}, "resources": resources}))
        return strata(tmp_path / "my.yaml")

    assert "on 1 x L40S\n" in said("NVIDIA-L40S").stdout
    ended = said("AMD-Instinct-MI300X")
    assert "on 1 x H200\n" in ended.stdout
    assert "'AMD-Instinct-MI300X' is not a known GPU: the estimate is for an h200" in ended.stderr


@pytest.mark.parametrize(
    "option", [("--tokens", "nan"), ("--tokens", "-1"), ("--price", "inf"), ("--price", "nan")], ids=" ".join
)
def test_numbers_that_are_none_are_refused(option):
    ended = strata(EXAMPLE, *option)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert option[0] in ended.stderr and "is not a finite number of at least 0" in ended.stderr


@pytest.mark.parametrize("most", ["0", "-3"])
def test_a_layout_takes_a_gpu_at_least(most):
    ended = strata(EXAMPLE, "--gpus", most)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--gpus" in ended.stderr and "greater than or equal to 1" in ended.stderr


def test_mistakes_are_reported(tmp_path):
    assert "'h300' is not one of h200" in strata(EXAMPLE, "--gpu", "h300").stderr
    (tmp_path / "my.yaml").write_text("model: {name: org/unknown}")
    ended = strata(tmp_path / "my.yaml")
    assert (ended.returncode, ended.stdout) == (2, "") and "--config" in ended.stderr
    (tmp_path / "my.yaml").write_text(
        "model: {name: llama-3.1-8b}\nparallel: {type: deepspeed}\ntopology: {nproc_per_node: 2}"
    )
    ended = strata(tmp_path / "my.yaml", "--gpu", "h200")
    assert (ended.returncode, ended.stdout) == (2, "") and "parallel.type: 'deepspeed' is not" in ended.stderr
    (tmp_path / "my.yaml").write_text("model: {name: llama-3.1-8b, attention: eager}")
    ended = strata(tmp_path / "my.yaml")
    assert (ended.returncode, ended.stdout) == (2, "") and "model.attention: 'eager'" in ended.stderr


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("kind", ["adafactor", "lion", "schedule_free"])
def test_moments_of_other_libraries_are_those_that_they_keep(kind, adapter):
    """Counted in the optimizer, after a step of a model of this shape."""
    spec = RunSpec.model_validate(
        {
            "model": {"name": "meta-llama/Llama-3.1-8B", "dtype": "bfloat16"},
            "optimizer": {"type": kind},
            "schedule": {"type": "constant"},
            "adapter": {"type": adapter, **({"r": 4} if adapter == "lora" else {})},
        }
    )
    model = build_model(RunSpec(model={"dtype": "bfloat16"}).model, 0)
    add_adapter(model, spec.adapter, 0)
    optimizer = build_optimizer(model, spec)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    kept = sum(
        tensor.nbytes for state in optimizer.state.values() for name, tensor in state.items()
        if tensor.ndim and name != "remainder"
    )  # fmt: skip
    estimated = moment_bytes(Workload.of(spec, KNOWN["tiny-llama"]))
    assert kept == estimated


@pytest.mark.parametrize("package", [strata_platform, estimate_package], ids=lambda package: package.__name__)
def test_no_module_has_the_name_of_a_public_object(package):
    """Names are imported when they are first used, and importing such a module would put it in the object's place."""
    assert not {module.name for module in pkgutil.iter_modules(package.__path__)} & set(package.__all__)


def test_float8_is_faster_and_keeps_the_inputs_of_products_in_bytes():
    plain, float8 = take(), take(training={"float8": "tensorwise"})
    assert 1.2 < float8.tokens_per_second / plain.tokens_per_second < 1.5
    assert take(training={"float8": "rowwise"}).tokens_per_second < float8.tokens_per_second
    shape, tokens = shape_of("llama-3.1-8b"), plain.workload.tokens
    # Norms give bytes in place of bf16; attention's output and the gate's are kept once more.
    beside = tokens * (shape.queries + shape.intermediate - 2 * shape.hidden)
    assert kept_by_layer(float8.workload) - kept_by_layer(plain.workload) == beside


def test_float8_weights_under_an_adapter_are_half_as_large():
    adapted = {"adapter": {"type": "lora"}}
    plain, float8 = take(**adapted), take(**adapted, training={"float8": "tensorwise"})
    assert plain.memory.weights - float8.memory.weights == 32 * LAYER
    assert take(**adapted, training={"float8": "rowwise"}).memory.weights == plain.memory.weights


def test_a_gpu_without_float8_is_rejected():
    with pytest.raises(SpecError, match=r"training\.float8: 'tensorwise', but A100 80 GB does not multiply in FP8"):
        estimate(spec_of(training={"float8": "tensorwise"}), shape_of("llama-3.1-8b"), GPUS["a100-80gb"])
