"""A fine-tune every night. Copy this file into the project's folder, change what is below, and register it:

    pyflyte register --copy all --destination-dir . --image REGISTRY/strata:0.1.0 nightly.py

The version that was registered last is the one that runs. `pyflyte launchplan --deactivate nightly` ends it.
"""

from pathlib import Path

from flytekit import CronSchedule, Email, LaunchPlan
from flytekit.models.core.execution import WorkflowExecutionPhase

from strata_platform.spec import load_spec
from workflows.scheduled import scheduled

nightly = LaunchPlan.get_or_create(
    scheduled,
    name="nightly",
    # Read when this file is registered. Every run has the name of the spec, with its time.
    fixed_inputs={"spec": load_spec(Path("examples/llama-3.1-8b-lora.yaml"))},
    # At two o'clock, UTC.
    schedule=CronSchedule(schedule="0 2 * * *", kickoff_time_input_arg="kickoff_time"),
    # Registered is switched on.
    auto_activate=True,
    # By Flyte's own mailer, also for what no pod can tell. Leave it out where Flyte has none.
    notifications=[
        Email(
            phases=[WorkflowExecutionPhase.FAILED, WorkflowExecutionPhase.TIMED_OUT, WorkflowExecutionPhase.ABORTED],
            recipients_email=["training@example.org"],
        )
    ],
)
