"""The client: ten methods for runs, the same for local processes and on a cluster, with Flyte or without.

    client = connect()                         # this machine; connect("flyte") is a cluster
    run = client.submit(load_spec("my.yaml"))
    for line in client.logs(run.name, follow=True):
        print(line.prefix, line.text)
    client.outputs(run.name).model

The methods return the types of `strata_platform.runs` and raise the errors of `strata_platform.errors`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from strata_platform.backends.backend import Backend, Pause, Retry
from strata_platform.errors import BackendError, DoesNotFit, SpecError, Unreachable, WaitTimeout
from strata_platform.runs import Event, Held, LogLine, MetricPoint, Outputs, Run

# The spec's models take longer to import than a look at a run takes.
if TYPE_CHECKING:
    from strata_platform.estimate import Estimate, Gpu, Prices
    from strata_platform.spec import RunSpec

log = logging.getLogger(__name__)

BackendName = Literal["local", "flyte", "kubernetes"]

_GIB = 2**30
# Seconds between two looks at a run whose log is followed. On a cluster each look reads the log of a pod.
_SHOW_SECONDS = 2.0
_PROJECT_AND_DOMAIN = {"STRATA_PROJECT": "flytesnacks", "STRATA_DOMAIN": "development"}


def connect(
    backend: BackendName = "local",
    *,
    image: str | None = None,
    version: str | None = None,
    project: str | None = None,
    poll: float = 1.0,
) -> Client:
    """A client for this machine, or for the cluster that the environment names.

    KUBECONFIG and, for Flyte, FLYTECTL_CONFIG name the cluster, as they do for kubectl and flytectl. STRATA_PROJECT and
    STRATA_DOMAIN default to flytesnacks and development; `project` overrides STRATA_PROJECT. FlyteBackend describes
    `image` and `version`; KubernetesBackend takes only an image.

    Raises BackendError if the packages for a cluster are not installed.
    """
    if backend == "local":
        return Client(poll=poll)
    try:
        if backend == "kubernetes":
            return Client(_kubernetes(image, version, project), poll=poll)
        from strata_platform.backends.flyte import FlyteBackend
    except ModuleNotFoundError as error:
        raise _not_installed(error, backend) from error
    return Client(FlyteBackend(*project_and_domain(project), image=image, version=version), poll=poll)


def _kubernetes(image: str | None, version: str | None, project: str | None) -> Backend:
    from strata_platform.backends.kubernetes import KubernetesBackend

    if version is not None:
        raise BackendError("versions are registrations of Flyte; name an image instead", status=422, reason="Invalid")
    return KubernetesBackend("-".join(project_and_domain(project)), image=image)


def _not_installed(error: ModuleNotFoundError, extra: str) -> BackendError:
    return BackendError(f"{error.name} is not installed; pip install 'strata-platform[{extra}]'")


def project_and_domain(project: str | None = None) -> tuple[str, str]:
    """Flyte project and domain, as the environment names them, or `project` in its place."""
    named, domain = (os.environ.get(name) or default for name, default in _PROJECT_AND_DOMAIN.items())
    return project or named, domain


def prices_of_cluster(project: str | None = None) -> Prices | None:
    """The table of prices that the chart put into the namespace of project and domain; None if there is none.

    Raises SpecError if the table is not valid, BackendError if the cluster does not answer.
    """
    from strata_platform.estimate.prices import CONFIG_MAP, KEY, parse_prices

    try:
        from strata_platform.backends.kubernetes_objects import Namespace
    except ModuleNotFoundError as error:
        raise _not_installed(error, "kubernetes") from error
    text = Namespace("-".join(project_and_domain(project))).text(CONFIG_MAP, KEY)
    return None if text is None else parse_prices(text, f"the config map {CONFIG_MAP}")


class Client:
    """Submits and follows runs. `poll`: seconds between two queries of a run."""

    def __init__(self, backend: Backend | None = None, *, poll: float = 1.0) -> None:
        if backend is None:
            from strata_platform.backends.local import LocalBackend

            backend = LocalBackend()
        self.backend = backend
        self._poll = poll

    def submit(self, spec: RunSpec, *, force: bool = False) -> Run:
        """Start a run, or continue the one in the spec's folder; returns at once.

        A run that has already succeeded with the same spec is returned unchanged; `force` starts it anyway.

        Raises:
            DoesNotFit: the estimate exceeds the memory of the GPUs; `force` submits the run anyway.
            BackendError: no queue can ever admit the run; `force` submits it anyway.
            RunExists: the run of this name has not ended.
        """
        if not force:
            if (finished := self.backend.finished(spec)) is not None:
                return finished
            self._require_fit(spec)
            self.backend.require_admission(spec.resources, spec.topology)
        return self.backend.submit(spec)

    def get(self, name: str) -> Run:
        """The current state of a run. Raises RunNotFound."""
        return self.backend.get(name)

    def wait(self, name: str, *, timeout: float | None = None, show: Callable[[Run], None] | None = None) -> Run:
        """Wait until the run has ended, and return it; `show` is called with the run at every query before that.

        Raises:
            RunNotFound: no run has this name.
            WaitTimeout: the run has not ended after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        retry = Retry()
        while True:
            try:
                run = self.get(name)
                retry.succeeded()
                if run.is_done:
                    return run
                if show is not None:
                    show(run)
            except Unreachable as error:
                retry.failed(error)
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"{name} has not ended after {timeout:g} s and is still in progress")
            time.sleep(self._poll)

    def logs(self, name: str, *, follow: bool = False, show: Callable[[Run], None] | None = None) -> Iterator[LogLine]:
        """The lines that the run's processes printed, all ranks in the order of time.

        With `follow`, also later lines, across restarts and preemptions, until the run ends. While there are no new
        lines, `show` is called with the run's state every few seconds.
        """
        pause = self._pause(follow)
        if pause is not None and show is not None:
            pause = self._pause_and_show(name, pause, show)
        return self.backend.logs(name, pause)

    def metrics(self, name: str, *, follow: bool = False) -> Iterator[MetricPoint]:
        """The metrics of the run's steps. A step repeated after a restart appears again with a higher `attempt`.

        With `follow`, also later steps, until the run ends.
        """
        return self.backend.metrics(name, self._pause(follow))

    def events(self, name: str) -> list[Event]:
        """The run's events so far, the oldest first."""
        return self.backend.events(name)

    def cancel(self, name: str) -> Run:
        """End the run, and return it once it has ended. It keeps its checkpoints: submit it again to continue."""
        self.backend.cancel(name)
        return self.wait(name)

    def outputs(self, name: str, *, to: Path | None = None) -> Outputs:
        """Paths of the model, the report and the record; with `to`, of copies in that folder.

        Raises NotReady if the run has not succeeded.
        """
        return self.backend.outputs(name, to)

    def estimate(self, spec: RunSpec, gpu: Gpu | None = None) -> Estimate | None:
        """Memory and time of the run on `gpu`, by default the GPU model that it would get; None if that is unknown.

        Raises SpecError if the model's shape is unknown.
        """
        from strata_platform.estimate import estimate, shape_of

        gpu = gpu or self.backend.gpu(spec.resources)
        return None if gpu is None else estimate(spec, shape_of(spec.model.name), gpu)

    def list(self, *, limit: int | None = None, owner: str | None = None) -> list[Run]:
        """The newest `limit` runs, or all; with `owner` only those that this person submitted."""
        return self.backend.list(limit, owner)

    def held(self, *, since: float = 0.0) -> Iterator[tuple[Run, Sequence[Held] | None]]:
        """The submissions since a time, the newest first, and the resources that each held; None if not known.

        A run that was submitted several times appears several times.
        """
        return self.backend.held(since)

    def _require_fit(self, spec: RunSpec) -> None:
        try:
            found = self.estimate(spec)
        except SpecError as error:
            log.warning("cannot estimate whether the run fits: %s", error.problems[0])
            return
        if found is None:
            return
        if reason := found.underestimated_because if found.fits else found.overestimated_because:
            log.warning("cannot estimate whether the run fits: %s", reason)
        if reason or found.fits:
            return
        from strata_platform.estimate import cheapest
        from strata_platform.estimate.render import describe_layout

        best = cheapest(spec, found.shape, found.gpu, 64)
        advice = f"this layout fits: {describe_layout(best.spec)}" if best else "no layout fits"
        raise DoesNotFit(
            f"the run needs {found.memory.peak / _GIB:.1f} GiB on each GPU, and a {found.gpu.name} has "
            f"{found.gpu.memory / _GIB:.1f}; {advice}. 'strata estimate' shows details, --force submits it anyway"
        )

    def _pause_and_show(self, name: str, pause: Pause, show: Callable[[Run], None]) -> Pause:
        shown = -math.inf

        def pause_and_show() -> None:
            nonlocal shown
            if time.monotonic() - shown >= _SHOW_SECONDS:
                # The log goes on, whether or not the state is known.
                with contextlib.suppress(BackendError):
                    show(self.get(name))
                shown = time.monotonic()
            pause()

        return pause_and_show

    def _pause(self, follow: bool) -> Pause | None:
        return (lambda: time.sleep(self._poll)) if follow else None
