"""Mixtures of experts: whole or by adapters, split over processes, exported as PEFT reads them."""

import importlib.util
import logging

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from strata_kernels import patch_model
from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.export.export_model import export
from tasks.runtime.models.adapters.adapter_folder import load_initial_adapter
from tasks.runtime.models.adapters.lora import add_adapter, require_adapter
from tasks.runtime.models.adapters.quantization import quantize_linear_layers
from tasks.runtime.models.build import build_model
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.preflight import run_checks
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tests.runtime.helpers.comparable_runs import SAVED, approx, curve, file_of, make_spec
from tests.runtime.helpers.mixture_folder import save_mixture
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec

pytestmark = [
    pytest.mark.usefixtures("narrowed", "forked_readers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft"),
]
BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
packed = pytest.mark.skipif(not BITSANDBYTES, reason="bitsandbytes is not installed")
TOKENS = torch.arange(5, 37)[None]
EXPERTS = {"type": "lora", "r": 4, "target_parameters": ["gate_up_proj", "down_proj"]}
ADAPTERS = {"whole": {"type": "none"}, "adapters": EXPERTS}
PACKED = {**EXPERTS, "quantization": "nf4"}
# In a run of one process four micro-batches make a step, in one of two processes two of each.
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
# Framework, strategy, its settings.
STRATEGIES = {
    "fsdp": ("hf", "fsdp", {"training": {"gradient_checkpointing": "full"}}),
    "zero-3": ("torch", "deepspeed", {"stage": 3}),
}


def spec_of(output, name, adapter, framework="torch", strategy="single", processes=1, **options):
    values = make_spec(output, name, framework, strategy, processes, "lora", **options).model_dump()
    values |= {"adapter": adapter, "kernels": {"enabled": True}}
    values["model"] = {"dtype": "float32", "name": f"{output}/{'balanced' if 'balanced' in name else 'pretrained'}"}
    values["evaluation"] |= {"samples": 0, "max_batches": 2}
    if adapter["type"] == "lora":
        values["export"] |= {"formats": ["safetensors", "adapter"]}
    return RunSpec.model_validate(values)


@pytest.fixture(scope="module")
def output(output):
    save_mixture(output / "pretrained")
    save_mixture(output / "balanced", **BALANCED)
    return output


@pytest.fixture(scope="module")
def alone(output):
    """One process: the spec, the record and the curve of each kind."""
    specs = {kind: spec_of(output, f"alone-{kind}", adapter) for kind, adapter in ADAPTERS.items()}
    specs["balanced"] = spec_of(output, "alone-balanced", ADAPTERS["whole"])
    if BITSANDBYTES:
        specs["packed"] = spec_of(output, "alone-packed", PACKED)
    return {kind: (spec, train_spec(spec), curve(spec)) for kind, spec in specs.items()}


@pytest.fixture(scope="module")
def split(output):
    """Two processes: each cell is trained, and then goes on from its checkpoint under the other strategy."""
    specs, files = {}, []
    for kind, adapter in ADAPTERS.items():
        for name, (framework, strategy, options) in STRATEGIES.items():
            spec = spec_of(output, f"{kind}-{name}", adapter, framework, strategy, 2, **options)
            specs[kind, name] = spec
            files.append(file_of(output, spec))
        for name, other in (("fsdp", "zero-3"), ("zero-3", "fsdp")):
            framework, strategy, options = STRATEGIES[other]
            spec = spec_of(output, f"{kind}-{name}", adapter, framework, strategy, 2, **options)
            files.append(f"{file_of(output, spec, f'{kind}-{name}-as-{other}')}@{SAVED}")
    for name, (framework, strategy, options) in STRATEGIES.items():
        specs["balanced", name] = spec_of(
            output, f"balanced-{name}", ADAPTERS["whole"], framework, strategy, 2, **options
        )
        files.append(file_of(output, specs["balanced", name]))
        if BITSANDBYTES:
            specs["packed", name] = spec_of(output, f"packed-{name}", PACKED, framework, strategy, 2, **options)
            files += [f"{file_of(output, specs['packed', name])}{at}" for at in ("", f"@{SAVED}")]
    launch(2, *files)
    return specs


@pytest.mark.parametrize("kind", [*ADAPTERS, "balanced", pytest.param("packed", marks=packed)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_processes_have_the_losses_of_one(alone, split, kind, name):
    assert curve(split[kind, name], attempt=0) == approx(alone[kind][2])


@packed
@pytest.mark.parametrize("name", STRATEGIES)
def test_packed_experts_come_back_exactly(split, name):
    assert curve(split["packed", name], attempt=1) == curve(split["packed", name], attempt=0)[SAVED:]


@packed
def test_packed_experts_are_those_that_bitsandbytes_rounds(output):
    """Against transformers' own code on weights that bitsandbytes has packed and restored, with PEFT's sums."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    spec, given = spec_of(output, "rounded", PACKED, training={"micro_batch_size": 1}), []
    for quantization in ("nf4", "none"):
        adapter = {**PACKED, "quantization": quantization}
        changed = RunSpec.model_validate({**spec.model_dump(), "adapter": adapter})
        model = build_model(changed.model, 0)
        with quantize_linear_layers(model, changed):
            add_adapter(model, changed.adapter, 0)
        for name, parameter in model.named_parameters():
            frozen = parameter.dim() in (2, 3) and "lm_head" not in name and "embed" not in name
            if "lora_" in name:
                torch.manual_seed(len(name))
                parameter.data += 0.1 * torch.randn_like(parameter)
            # Linear layers and experts; routers stay exact.
            elif quantization == "none" and frozen and "gate.weight" not in name:
                rounding = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": True}
                parameter.data = dequantize_4bit(*quantize_4bit(parameter.data, **rounding))
        if quantization == "nf4":
            assert patch_model(model).counts["experts"] == 2
            model.to("cpu")
            experts = model.model.layers[0].mlp.experts.get_base_layer()
            assert experts.gate_up_proj.nbytes == 6 * 32 * 32 / 2
        output_of = model.train()(TOKENS, labels=TOKENS, **({"skip_logits": True} if quantization == "nf4" else {}))
        learned = [p for name, p in model.named_parameters() if "lora_" in name]
        given.append([output_of.loss.detach(), *torch.autograd.grad(output_of.loss, learned)])
    torch.testing.assert_close(*given, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("name", ["fsdp", "zero-3"])
def test_another_strategy_goes_on_from_the_checkpoint(alone, split, kind, name):
    assert curve(split[kind, name], attempt=1) == approx(alone[kind][2][SAVED:])


@pytest.mark.parametrize("kind", ADAPTERS)
def test_one_process_goes_on_from_what_two_began(alone, split, output, kind):
    spec = spec_of(output, f"{kind}-zero-3", ADAPTERS[kind])
    assert train_spec(spec, SAVED).status == "complete"
    assert curve(spec) == approx(alone[kind][2])


def test_a_resumed_run_computes_the_same_bits(alone):
    spec, _, expected = alone["adapters"]
    assert train_spec(spec, SAVED).status == "complete"
    assert curve(spec) == expected


def test_checkpoints_hold_the_adapters_alone(alone):
    names = list(Index(checkpoint.latest(RunFolder.of(alone["adapters"][0]).checkpoints)))
    assert all("lora_" in name for name in names if not name.startswith("random."))
    experts = "model.model.layers.1.mlp.experts."
    assert {name.removeprefix(experts) for name in names if name.startswith(experts)} == {
        f"{wrapped}lora_{factor}.default.weight" for wrapped in ("", "base_layer.") for factor in "AB"
    }


@pytest.fixture(scope="module")
def exported(alone):
    spec, record, _ = alone["adapters"]
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    data = prepare(recipe, data_folder(spec.output, recipe), report=print)
    weights = collect_weights(RunFolder.of(spec), spec.adapter, record)
    return export(spec, evaluate(spec, record, data, weights), data, weights).model


def logits(model):
    with torch.inference_mode():
        return model.eval()(TOKENS).logits


def test_peft_reads_the_adapter_and_it_is_the_merged_model(exported, output):
    merged = AutoModelForCausalLM.from_pretrained(exported)
    base = AutoModelForCausalLM.from_pretrained(output / "pretrained")
    before = logits(base)
    theirs = PeftModel.from_pretrained(base, exported, subfolder="adapter")
    torch.testing.assert_close(logits(theirs), logits(merged), rtol=1e-4, atol=1e-4)
    assert (logits(merged) - before).abs().max() > 0.1
    # PEFT's own sum of weights and adapter against the two products.
    unfused = logits(theirs)
    assert patch_model(theirs).counts["experts"] == 2
    torch.testing.assert_close(logits(theirs), unfused, rtol=1e-4, atol=1e-4)


def test_a_run_starts_from_the_adapter_and_from_one_of_peft(exported, output, tmp_path):
    torch.manual_seed(2)
    config = LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=EXPERTS["target_parameters"],
        init_lora_weights=False,
    )
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(output / "pretrained"), config)
    theirs.save_pretrained(tmp_path)
    own = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(output / "pretrained"), exported, subfolder="adapter"
    )
    for folder, expected in ((tmp_path, theirs), (exported / "adapter", own)):
        spec = spec_of(output, "started", {**EXPERTS, "init_from": str(folder)})
        model = build_model(spec.model, 0)
        add_adapter(model, spec.adapter, 0)
        load_initial_adapter(model, spec.adapter, spec.model)
        torch.testing.assert_close(logits(model), logits(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("adapter", "kernels", "said"),
    [
        ({"type": "lora"}, "auto", "experts are frozen; adapter.target_parameters [gate_up_proj, down_proj] adapts"),
        (EXPERTS, "auto", "experts are adapted, and no sum of weights and adapter is made"),
        (EXPERTS, False, "experts are adapted without the fused operator"),
    ],
    ids=["frozen", "fused", "unfused"],
)
def test_a_line_says_what_becomes_of_experts(output, caplog, adapter, kernels, said):
    values = spec_of(output, f"said-{len(said)}", adapter, steps=1).model_dump()
    with caplog.at_level(logging.INFO):
        train_spec(RunSpec.model_validate({**values, "kernels": {"enabled": kernels}}))
    assert said in caplog.text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gate_proj", "'gate_proj' is not the weight of experts; choose from gate_up_proj, down_proj"),
        ("gate.weight", "'gate.weight' is not the weight of experts"),
    ],
)
def test_other_parameters_are_refused(output, name, said):
    spec = spec_of(output, "refused", {**EXPERTS, "target_parameters": [name]})
    with pytest.raises(ValueError, match=said):
        add_adapter(build_model(spec.model, 0), spec.adapter, 0)


def mixture_of(tmp_path, kind):
    """A family whose shared expert is made of linear layers, beside experts that are not."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
             "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
             "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(tmp_path)
    return {"model": {"name": str(tmp_path), "dtype": "float32"}}


def test_all_linear_layers_are_those_and_no_experts(tmp_path):
    """PEFT's "all-linear" takes the names of a shared expert's layers for those of experts in transformers 4."""
    spec = RunSpec.model_validate({**mixture_of(tmp_path, "glm4_moe"), "adapter": {"type": "lora", "r": 4}})
    model = build_model(spec.model, 0)
    linear = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"}
    add_adapter(model, spec.adapter, 0)
    assert {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad} == linear
    assert any("shared_experts.gate_proj" in name for name in linear)


def test_an_export_that_peft_would_misread_is_refused_before_the_data_are_prepared(tmp_path):
    values = mixture_of(tmp_path, "glm4_moe") | {"export": {"formats": ["adapter"]}}
    spec = RunSpec.model_validate({**values, "adapter": {"type": "lora"}})
    with pytest.raises(ValueError, match=r"in a glm4_moe PEFT takes down_proj, gate_proj, up_proj for experts"):
        run_checks("launch", "spec", spec=spec)
    require_adapter(RunSpec.model_validate({**values, "adapter": {"type": "lora", "target_modules": ["q_proj"]}}))
    require_adapter(RunSpec.model_validate({**values, "adapter": {"type": "lora"}, "export": {}}))
