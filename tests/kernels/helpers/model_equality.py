"""Whether a patched model computes what the model computes: both are held against the model in fp64."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strata_kernels import PatchReport, patch_model

# How far from fp64, relative to a tensor's norm, whatever the unpatched model is: a few roundings of the format.
ROUNDINGS = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
# At most as often the unpatched model is run with other roundings, where the patched one is further from fp64 in bf16.
DRAWS = 64
Step = Callable[[nn.Module], dict[str, Tensor]]


def run(model: nn.Module, step: Step) -> dict[str, Tensor]:
    """What `step` gives, and the gradients of all parameters that its loss reaches."""
    model.zero_grad()
    found = step(model)
    found["loss"].backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach().clone() for name, value in (found | gradients).items()}


def distances(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Of each tensor, relative to its norm, or to the largest norm where it is zero but for roundings.

    The gradient of a bias of keys is such a zero: it adds the same to all scores of a query.
    """
    assert found.keys() == exact.keys()
    norms = {name: float(y.norm()) for name, y in exact.items()}
    largest = max(norms.values())
    return {
        name: float((found[name].double() - y).norm()) / (norms[name] if norms[name] > 1e-9 * largest else largest)
        for name, y in exact.items()
    }


def distances_of_roundings(model: nn.Module, step: Step, exact: dict[str, Tensor]) -> Iterator[dict[str, float]]:
    """`distances` of the model if half of what every norm gives, drawn each time, is the next number of the format.

    A sum of terms that cancel, or an expert that is chosen by a narrow margin, moves further by one rounding than one
    run of the model tells.
    """
    draw = torch.Generator().manual_seed(0)

    def nudge(module: nn.Module, inputs: object, result: Tensor) -> Tensor:
        chosen = torch.rand(result.shape, generator=draw).to(result.device) < 0.5
        following = torch.nextafter(result.detach(), torch.full_like(result, torch.inf))
        return result + torch.where(chosen, following - result.detach(), 0.0)

    model = copy.deepcopy(model)
    norms = [part for part in model.modules() if type(part).__name__.endswith("Norm")]
    assert norms
    for norm in norms:
        norm.register_forward_hook(nudge)
    for _ in range(DRAWS):
        yield distances(run(model, step), exact)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in `dtype`. `Module.to` would take the imaginary part of Llama 4's rotation."""
    model = copy.deepcopy(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model


def has_sdpa(model: nn.Module) -> bool:
    return all(part._supports_sdpa for part in model.modules() if isinstance(part, PreTrainedModel))


def assert_equal_when_patched(model: nn.Module, step: Step) -> PatchReport:
    """Fail if a loss, a logit or a gradient of the patched model is further from fp64 than twice the unpatched model's.

    In fp32 with eager attention and SDPA and in bf16 with the latter, with layers recomputed in the backward pass and
    not. In bf16 the unpatched model may round otherwise, if that is needed: fp32 is where a wrong formula shows.

    model: of any type. Its weights are rounded to bf16, so that one model in fp64 is exact for both types.
    step: the loss, and other tensors to compare, of a model.
    """
    model = cast(model, torch.bfloat16)
    in_fp64 = cast(model, torch.float64)
    in_fp64.set_attn_implementation("eager")
    in_fp64.set_experts_implementation("eager")
    exact = run(in_fp64, step)
    faults = []
    for attention in ["eager", "sdpa"] if has_sdpa(model) else ["eager"]:
        # An attention of transformers rounds in bf16 whatever is patched around it: one of them shows that.
        for dtype in ROUNDINGS if attention == "sdpa" or not has_sdpa(model) else [torch.float32]:
            rounding = ROUNDINGS[dtype]
            plain = cast(model, dtype)
            plain.set_attn_implementation(attention)
            patched = copy.deepcopy(plain)
            report = patch_model(patched)
            found = {"": distances(run(patched, step), exact)}
            if model.supports_gradient_checkpointing:
                recompute(patched)
                found[", recomputed"] = distances(run(patched, step), exact)
            furthest = {name: max(cell[name] for cell in found.values()) for name in exact}
            bars = {name: 2 * far + rounding for name, far in distances(run(plain, step), exact).items()}
            draws = distances_of_roundings(plain, step, exact) if dtype == torch.bfloat16 else iter(())
            while any(far > bars[name] for name, far in furthest.items()) and (drawn := next(draws, None)):
                bars = {name: max(bar, 2 * drawn[name] + rounding) for name, bar in bars.items()}
            faults += [
                f"{dtype}, {attention}{cell}: {name} is {far:.2e} from fp64, the limit is {bars[name]:.2e}"
                for cell, distance in found.items()
                for name, far in distance.items()
                if not far <= bars[name]
            ]
    assert not faults, "\n".join(faults)
    return report


def recompute(model: nn.Module) -> None:
    # transformers 5.22 has renamed it.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
