"""Flyte tasks of a scheduled run: a name with the time, and a message when the run ends.

The message is a POST of {"text": ...} to a chat's webhook. The webhook's URL is a secret, as it grants write access:
the key `url` of the tenant's Kubernetes secret `announcements`, or ANNOUNCEMENTS_URL on one machine. Without the secret
no message is sent. A message that cannot be sent causes a warning and never fails the run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import urllib.request
from collections.abc import Sequence
from datetime import datetime
from http.client import HTTPException
from typing import Any, Optional
from urllib.error import HTTPError, URLError

from flytekit import Secret, current_context, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error import FlyteError
from flytekit.types.file import FlyteFile

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.fields import LONGEST_NAME
from tasks.paths import fetched
from tasks.resources import CONTROL_TASK
from tasks.runtime.process.log import configure_logging
from tasks.runtime.report.numbers import duration
from tasks.runtime.run_folder.record import CompletionRecord

log = logging.getLogger(__name__)

WEBHOOK = Secret(group="announcements", key="url")
# Chats truncate long texts; the end of an error says most.
_LONGEST_ERROR = 1200
_HEADERS = {"Content-Type": "application/json"}
_TIMEOUT_SECONDS = 10
# Between two attempts.
_PAUSES_SECONDS = (1, 5)


@task(**CONTROL_TASK)
def dated_spec(spec: RunSpec, kickoff_time: datetime) -> RunSpec:
    """`spec` with the time in its name; under yesterday's name it would find yesterday's finished run."""
    return RunSpec.model_validate(spec.model_dump() | {"name": _dated(spec.name, kickoff_time)})


@task(**CONTROL_TASK, secret_requests=[WEBHOOK])
def announce(spec: RunSpec, record: FlyteFile, model: FlyteDirectory) -> None:
    """Announce that the run of `spec` is done, with its loss and the address of its model, which is not downloaded."""
    configure_logging()
    done = CompletionRecord.load(fetched(record))
    loss = f"loss {done.train_loss:.4f}"
    if done.eval_loss_after is not None:
        before = "" if done.eval_loss_before is None else f", {done.eval_loss_before:.4f} before"
        loss = f"validation loss {done.eval_loss_after:.4f}{before}"
    work = f"{done.steps:,} steps, {done.tokens:,} tokens in {duration(done.seconds)}"
    where = f"{_where()}\n{model.remote_source or model.path}"
    _send(f"{spec.name} is done: {loss}; {work} on {done.world_size} x {done.device}. {where}")


# Flyte passes the workflow's inputs, and the error under this name and type.
@task(**CONTROL_TASK, secret_requests=[WEBHOOK])
def announce_failure(spec: RunSpec, kickoff_time: datetime, err: Optional[FlyteError] = None) -> None:  # noqa: UP045
    """Announce that the run failed, with its error."""
    configure_logging()
    why = err.message.strip() if err else "Flyte reported no error"
    if len(why) > _LONGEST_ERROR:
        why = f"... {why[-_LONGEST_ERROR:]}"
    _send(f"{_dated(spec.name, kickoff_time)} failed. {_where()}\n{why}")


def _dated(name: str, kickoff_time: datetime) -> str:
    """The name with the time; a name that is too long for both is shortened and gets a digest."""
    time = f"-{kickoff_time:%Y%m%d-%H%M}"
    room = LONGEST_NAME - len(time)
    if len(name) > room:
        digest = hashlib.sha256(name.encode()).hexdigest()[:6]
        name = f"{name[: room - 7]}-{digest}"
    return f"{name}{time}"


def _where() -> str:
    """The execution, as Flyte's console and command line identify it."""
    run = current_context().execution_id
    return f"Execution {run.name} in {run.project}-{run.domain}"


def _send(text: str) -> None:
    """POST the message. Logs and errors never contain the URL."""
    try:
        url = current_context().secrets.get(WEBHOOK.group, WEBHOOK.key)
    except ValueError:
        log.warning("no message is sent: the secret %r with the key %r does not exist", WEBHOOK.group, WEBHOOK.key)
        return
    log.info("%s", text)
    problem = _post(url, {"text": text}, _PAUSES_SECONDS)
    if problem is not None:
        log.warning("the message was not sent: %s", problem)


class _Here(urllib.request.HTTPRedirectHandler):
    """Rejects redirects: a POST would continue as a GET, without the message, and seem to succeed."""

    def redirect_request(self, *_: Any) -> None:
        """Leave the redirect an error."""


def _post(url: str, body: dict[str, str], pauses: Sequence[float]) -> str | None:
    """Send `body` as JSON, with a retry after each of `pauses` if one may help. Returns the last problem, or None."""
    if not url.startswith(("https://", "http://")):
        return f"the key {WEBHOOK.key!r} of the secret {WEBHOOK.group!r} is not a URL that begins with https://"
    opener = urllib.request.build_opener(_Here)
    problem = None
    for pause in (*pauses, None):
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), _HEADERS, method="POST")  # noqa: S310
            with opener.open(request, timeout=_TIMEOUT_SECONDS):
                return None
        except HTTPError as error:
            problem = f"the webhook answered {error.code}"
            error.close()
            if error.code < 500 and error.code != 429:
                return problem
        except URLError as error:
            problem = f"the webhook cannot be reached: {error.reason}"
        except (OSError, HTTPException, ValueError) as error:
            # The texts of these errors may contain the URL.
            problem = f"the webhook cannot be reached: {type(error).__name__}"
        if pause is not None:
            time.sleep(pause)
    return problem
