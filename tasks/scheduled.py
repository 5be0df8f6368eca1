"""Flyte tasks of a run that nobody waits for: a name of its own, and a message when it ends, well or not.

The message goes to a webhook, as chats have them: a POST of {"text": ...}. Its address is a secret, as whoever has it
may write there: the key `url` of the tenant's Kubernetes secret `announcements`, or ANNOUNCEMENTS_URL on one machine.
Without one nothing is sent. A message that cannot be sent is warned of, and never the end of a run.
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
from pathlib import Path
from typing import Any, Optional
from urllib.error import HTTPError, URLError

from flytekit import Secret, current_context, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error import FlyteError
from flytekit.types.file import FlyteFile

from strata_platform.spec import RunSpec
from strata_platform.spec.fields import LONGEST_NAME
from tasks.resources import CONTROL_TASK
from tasks.runtime.process.log import configure_logging
from tasks.runtime.report.numbers import duration
from tasks.runtime.run_folder.record import CompletionRecord

log = logging.getLogger(__name__)

WEBHOOK = Secret(group="announcements", key="url")
# Chats cut off long texts; of an error the end says most.
_LONGEST_ERROR = 1200
_HEADERS = {"Content-Type": "application/json"}
_TIMEOUT_SECONDS = 10
# Between two attempts.
_PAUSES_SECONDS = (1, 5)


@task(**CONTROL_TASK)
def dated_spec(spec: RunSpec, kickoff_time: datetime) -> RunSpec:
    """`spec` with the time in its name: under the name of yesterday's run it would find that finished."""
    return RunSpec.model_validate(spec.model_dump() | {"name": _name(spec, kickoff_time)})


@task(**CONTROL_TASK, secret_requests=[WEBHOOK])
def announce(spec: RunSpec, record: FlyteFile, model: FlyteDirectory) -> None:
    """Tell that the run of `spec` is done, how well, and where the model is, which is not fetched for it."""
    configure_logging()
    done = CompletionRecord.load(Path(record.download()))
    loss = f"loss {done.train_loss:.4f}"
    if done.eval_loss_after is not None:
        before = "" if done.eval_loss_before is None else f", {done.eval_loss_before:.4f} before"
        loss = f"validation loss {done.eval_loss_after:.4f}{before}"
    work = f"{done.steps:,} steps, {done.tokens:,} tokens in {duration(done.seconds)}"
    where = f"{_where()}\n{model.remote_source or model.path}"
    _send(f"{spec.name} is done: {loss}; {work} on {done.world_size} x {done.device}. {where}")


# Flyte hands over the workflow's inputs, and the error under this name and type.
@task(**CONTROL_TASK, secret_requests=[WEBHOOK])
def announce_failure(spec: RunSpec, kickoff_time: datetime, err: Optional[FlyteError] = None) -> None:  # noqa: UP045
    """Tell that the run failed, and of what."""
    configure_logging()
    why = err.message.strip() if err else "no error is known"
    if len(why) > _LONGEST_ERROR:
        why = f"... {why[-_LONGEST_ERROR:]}"
    _send(f"{_name(spec, kickoff_time)} failed. {_where()}\n{why}")


def _name(spec: RunSpec, kickoff_time: datetime) -> str:
    """With the time; of a name that leaves no room for it the beginning and a digest are kept."""
    time, name = f"-{kickoff_time:%Y%m%d-%H%M}", spec.name
    room = LONGEST_NAME - len(time)
    if len(name) > room:
        digest = hashlib.sha256(name.encode()).hexdigest()[:6]
        name = f"{name[: room - 7]}-{digest}"
    return f"{name}{time}"


def _where() -> str:
    """The execution, as Flyte's console and command line name it."""
    run = current_context().execution_id
    return f"Execution {run.name} in {run.project}-{run.domain}"


def _send(text: str) -> None:
    """POST the message. What goes wrong is told without the address: it is in no log, and in no error of ours."""
    try:
        url = current_context().secrets.get(WEBHOOK.group, WEBHOOK.key)
    except ValueError:
        log.warning("no message is sent: there is no secret %r with the key %r", WEBHOOK.group, WEBHOOK.key)
        return
    log.info("%s", text)
    problem = _post(url, {"text": text}, _PAUSES_SECONDS)
    if problem is not None:
        log.warning("the message was not sent: %s", problem)


class _Here(urllib.request.HTTPRedirectHandler):
    """No redirections: a POST would go on as a GET, without the message, and seem well."""

    def redirect_request(self, *_: Any) -> None:
        """Leave the answer an error."""


def _post(url: str, body: dict[str, str], pauses: Sequence[float]) -> str | None:
    """Send `body` as JSON, again after each of `pauses` where that may help; what went wrong in the end, or None."""
    if not url.startswith(("https://", "http://")):
        return f"the key {WEBHOOK.key!r} of the secret {WEBHOOK.group!r} is no address that begins with https://"
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
            # Their texts may quote the address.
            problem = f"the webhook cannot be reached: {type(error).__name__}"
        if pause is not None:
            time.sleep(pause)
    return problem
