"""Calls of Flyte's control plane, in its own messages (flyteidl), without flytekit: that takes a second to import.

If Flyte asks who calls, people who are logged in, and programs with a secret, get a token without it (`flyte_token`);
others log in by it (`flyte_login`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
from flyteidl.admin import common_pb2, execution_pb2, launch_plan_pb2, node_execution_pb2, task_execution_pb2
from flyteidl.core import identifier_pb2, literals_pb2
from flyteidl.service import admin_pb2_grpc

from strata_platform.backends.flyte_config import FlyteConfig
from strata_platform.backends.flyte_login import logged_in_channel, login_errors_explained
from strata_platform.backends.flyte_token import token_header

_PAGE = 100
_SECONDS = 60.0
_MIB = 2**20
# Flyte restarts; a call that did not reach it is sent again.
_RETRY = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
# Flyte's messages hold whole workflows. The keepalive finds a connection that a load balancer has dropped; servers of
# Flyte's kind end one that is asked more often than every five minutes.
_OPTIONS = (
    ("grpc.max_receive_message_length", 256 * _MIB),
    ("grpc.max_metadata_size", 32 * 1024),
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(_RETRY)),
)

_LAUNCH_PLAN = identifier_pb2.LAUNCH_PLAN


class FlyteAdmin:
    """Flyte's AdminService for one project and domain. Every method raises grpc.RpcError and LoginFailed."""

    def __init__(self, config: FlyteConfig, project: str, domain: str) -> None:
        self.config, self.project, self.domain = config, project, domain
        # Of calls without flytekit: none at first, then those with a token.
        self._headers: list[tuple[str, str]] = []
        self._needs_flytekit = config.proxied

    @cached_property
    def _channel(self) -> grpc.Channel:
        return _channel(self.config)

    @cached_property
    def _logged_in(self) -> admin_pb2_grpc.AdminServiceStub:
        return admin_pb2_grpc.AdminServiceStub(logged_in_channel(self.config, _OPTIONS))

    def _call(self, method: str, request: Any) -> Any:
        while not self._needs_flytekit:
            stub = admin_pb2_grpc.AdminServiceStub(self._channel)
            try:
                return getattr(stub, method)(request, timeout=_SECONDS, metadata=self._headers)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    raise
            # A second refusal is that of a token that has expired.
            header = None if self._headers else token_header(self.config, self._channel)
            self._headers = [header] if header else []
            self._needs_flytekit = header is None
        with login_errors_explained():
            return getattr(self._logged_in, method)(request, timeout=_SECONDS)

    def execution_id(self, name: str) -> identifier_pb2.WorkflowExecutionIdentifier:
        """The identifier of an execution of this project and domain."""
        return identifier_pb2.WorkflowExecutionIdentifier(project=self.project, domain=self.domain, name=name)

    def execution(self, name: str) -> execution_pb2.Execution:
        """The execution of this name."""
        return self._call("GetExecution", execution_pb2.WorkflowExecutionGetRequest(id=self.execution_id(name)))

    def executions(self, filters: str = "") -> Iterator[execution_pb2.Execution]:
        """Executions that pass Flyte's `filters`, the newest first; pages are read as they are needed."""
        scope = common_pb2.NamedEntityIdentifier(project=self.project, domain=self.domain)
        newest = common_pb2.Sort(key="created_at", direction=common_pb2.Sort.DESCENDING)
        return self._pages(
            "ListExecutions",
            "executions",
            lambda token: common_pb2.ResourceListRequest(
                id=scope, limit=_PAGE, token=token, sort_by=newest, filters=filters
            ),
        )

    def create(
        self,
        name: str,
        launch_plan: identifier_pb2.Identifier,
        inputs: literals_pb2.LiteralMap,
        labels: dict[str, str],
        annotations: dict[str, str],
    ) -> None:
        """Start an execution; ALREADY_EXISTS if one has this name."""
        spec = execution_pb2.ExecutionSpec(
            launch_plan=launch_plan,
            metadata=execution_pb2.ExecutionMetadata(mode=execution_pb2.ExecutionMetadata.MANUAL, nesting=0),
            notifications=execution_pb2.NotificationList(),
            labels=common_pb2.Labels(values=labels),
            annotations=common_pb2.Annotations(values=annotations),
        )
        request = execution_pb2.ExecutionCreateRequest(
            project=self.project, domain=self.domain, name=name, spec=spec, inputs=inputs
        )
        self._call("CreateExecution", request)

    def terminate(self, name: str, cause: str) -> None:
        """End an execution."""
        request = execution_pb2.ExecutionTerminateRequest(id=self.execution_id(name), cause=cause)
        self._call("TerminateExecution", request)

    def outputs(self, name: str) -> dict[str, str]:
        """Names and addresses of the files and folders that an execution returned."""
        request = execution_pb2.WorkflowExecutionGetDataRequest(id=self.execution_id(name))
        return _addresses(self._call("GetExecutionData", request).full_outputs)

    def inputs(self, name: str) -> literals_pb2.LiteralMap:
        """The inputs of an execution."""
        request = execution_pb2.WorkflowExecutionGetDataRequest(id=self.execution_id(name))
        return self._call("GetExecutionData", request).full_inputs

    def inner_outputs(self, name: str, parent: str = "") -> Iterator[dict[str, str]]:
        """The outputs of each node that ended well in the dynamic tasks of an execution, or of the node `parent`."""
        for node in self._nodes(name, parent):
            if parent:
                request = node_execution_pb2.NodeExecutionGetDataRequest(id=node.id)
                yield _addresses(self._call("GetNodeExecutionData", request).full_outputs)
            if node.metadata.is_parent_node or node.metadata.is_dynamic:
                yield from self.inner_outputs(name, node.id.node_id)

    def task_executions(self, name: str, parent: str = "") -> Iterator[task_execution_pb2.TaskExecution]:
        """The attempts of every task of an execution, or of the node `parent`."""
        for node in self._nodes(name, parent):
            if node.metadata.is_parent_node or node.metadata.is_dynamic:
                yield from self.task_executions(name, node.id.node_id)
            else:
                yield from self._attempts(node.id)

    def _attempts(self, node: identifier_pb2.NodeExecutionIdentifier) -> Iterator[task_execution_pb2.TaskExecution]:
        return self._pages(
            "ListTaskExecutions",
            "task_executions",
            lambda token: task_execution_pb2.TaskExecutionListRequest(node_execution_id=node, limit=_PAGE, token=token),
        )

    def task_inputs(self, identifier: identifier_pb2.TaskExecutionIdentifier) -> literals_pb2.LiteralMap:
        """The inputs of an attempt of a task."""
        request = task_execution_pb2.TaskExecutionGetDataRequest(id=identifier)
        return self._call("GetTaskExecutionData", request).full_inputs

    def _nodes(self, name: str, parent: str = "") -> Iterator[node_execution_pb2.NodeExecution]:
        return self._pages(
            "ListNodeExecutions",
            "node_executions",
            lambda token: node_execution_pb2.NodeExecutionListRequest(
                workflow_execution_id=self.execution_id(name), limit=_PAGE, token=token, unique_parent_id=parent
            ),
        )

    def _pages(self, method: str, field: str, request: Callable[[str], Any]) -> Iterator[Any]:
        """The items of a list of Flyte's; pages are read as they are needed."""
        token = ""
        while True:
            page = self._call(method, request(token))
            yield from getattr(page, field)
            token = page.token
            if not token or not getattr(page, field):
                return

    def launch_plan(self, name: str, version: str) -> launch_plan_pb2.LaunchPlan:
        """The launch plan of this name and version."""
        identifier = identifier_pb2.Identifier(
            resource_type=_LAUNCH_PLAN, project=self.project, domain=self.domain, name=name, version=version
        )
        return self._call("GetLaunchPlan", common_pb2.ObjectGetRequest(id=identifier))

    def active_launch_plan(self, name: str) -> launch_plan_pb2.LaunchPlan:
        """The version of a launch plan that somebody activated; NOT_FOUND without one."""
        identifier = common_pb2.NamedEntityIdentifier(project=self.project, domain=self.domain, name=name)
        return self._call("GetActiveLaunchPlan", launch_plan_pb2.ActiveLaunchPlanRequest(id=identifier))


def _channel(config: FlyteConfig) -> grpc.Channel:
    if config.insecure:
        return grpc.insecure_channel(config.endpoint, options=_OPTIONS)
    roots = None
    if config.skip_verify:
        import ssl

        host, _, port = config.endpoint.rpartition(":")
        address = (host, int(port)) if port.isdigit() else (config.endpoint, 443)
        roots = ssl.get_server_certificate(address).encode()
    elif config.ca_file:
        roots = Path(config.ca_file).read_bytes()
    return grpc.secure_channel(config.endpoint, grpc.ssl_channel_credentials(roots), options=_OPTIONS)


def _addresses(found: literals_pb2.LiteralMap) -> dict[str, str]:
    """Names and addresses of files and folders; of values of other kinds an empty address."""
    return {name: literal.scalar.blob.uri for name, literal in found.literals.items()}
