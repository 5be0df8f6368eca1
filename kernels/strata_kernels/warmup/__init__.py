"""Compile, before training starts, exactly the kernels that training will launch.

    plan = record(step)      run the real step on meta tensors and record its launches; no GPU, memory or compiler
    report = warmup(plan)    compile and load the kernels on the current GPU, in parallel; never raises

`count_compiles` counts the kernels that training compiles, i.e. those missing from the plan. `bake.bake` compiles a
plan on a machine without a GPU. `plan_model.plan_model` makes a plan from a model's configuration.
"""

from .compile import Compiled, Failed, WarmupReport, warmup
from .compile_counter import CompileCount, count_compiles
from .plan import Plan, Pointer, Specialization, record

__all__ = [
    "CompileCount",
    "Compiled",
    "Failed",
    "Plan",
    "Pointer",
    "Specialization",
    "WarmupReport",
    "count_compiles",
    "record",
    "warmup",
]
