"""Describe, check, submit and follow training runs. Never imports torch.

    from strata_platform import connect, load_spec

    client = connect()                            # this machine; connect("flyte") is a cluster
    run = client.submit(load_spec("my.yaml"))
    for line in client.logs(run.name, follow=True):
        print(line.prefix, line.text)
    print(client.outputs(run.name).model)

Every exception is a `StrataError`; `strata_platform.errors` draws the tree. `strata_platform.testing` has a backend for
tests of your own code. Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_platform.lazy_names import lazy_names

if TYPE_CHECKING:
    from strata_platform.client import Client, connect
    from strata_platform.errors import (
        BackendError,
        DoesNotFit,
        NotReady,
        Problem,
        Refused,
        RunExists,
        RunNotFound,
        SpecError,
        StrataError,
        Unreachable,
        WaitTimeout,
    )
    from strata_platform.runs import Event, LogLine, MetricPoint, Outputs, Phase, Run, Stage
    from strata_platform.spec import RunSpec, dump_spec, load_spec

__all__ = [
    "BackendError",
    "Client",
    "DoesNotFit",
    "Event",
    "LogLine",
    "MetricPoint",
    "NotReady",
    "Outputs",
    "Phase",
    "Problem",
    "Refused",
    "Run",
    "RunExists",
    "RunNotFound",
    "RunSpec",
    "SpecError",
    "Stage",
    "StrataError",
    "Unreachable",
    "WaitTimeout",
    "connect",
    "dump_spec",
    "load_spec",
]

__getattr__ = lazy_names(
    __name__,
    {
        "client": ("Client", "connect"),
        "errors": (
            "BackendError", "DoesNotFit", "NotReady", "Problem", "Refused", "RunExists", "RunNotFound", "SpecError",
            "StrataError", "Unreachable", "WaitTimeout",
        ),
        "runs": ("Event", "LogLine", "MetricPoint", "Outputs", "Phase", "Run", "Stage"),
        "spec": ("RunSpec", "dump_spec", "load_spec"),
    },
)  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
