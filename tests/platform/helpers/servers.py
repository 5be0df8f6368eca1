"""A Flyte and a Kubernetes that answer over gRPC and HTTP what a test puts into them."""

import base64
import json
import re
import threading
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, quote_plus, urlparse

import grpc
from flyteidl.admin import execution_pb2, launch_plan_pb2, node_execution_pb2, task_execution_pb2
from flyteidl.core import execution_pb2 as core_pb2
from flyteidl.core import identifier_pb2, literals_pb2
from flyteidl.service import admin_pb2_grpc, auth_pb2, auth_pb2_grpc

from strata_platform.backends.kubernetes_objects import Namespace

NAMESPACE = "flytesnacks-development"
TRAIN = "tasks-topology-train-2x2"


def pod(name, task=TRAIN, phase="Running", replica=None, **more):
    """A pod as the API server sends it."""
    labels = {"execution-id": "run", "task-name": task}
    if replica is not None:
        labels["training.kubeflow.org/replica-index"] = str(replica)
    begun = {"state": {"running": {}} if phase == "Running" else {"terminated": {"exitCode": 0}}}
    status = {"name": "pytorch", "image": "i", "imageID": "", "ready": True, "restartCount": 0, **begun}
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "labels": labels,
                     "creationTimestamp": "2026-11-22T00:00:00Z"},
        "spec": {"containers": [{"name": "pytorch", "env": [{"name": "FLYTE_ATTEMPT_NUMBER", "value": "1"}]}]},
        "status": {"phase": phase, "containerStatuses": [] if phase == "Pending" else [status], **more},
    }  # fmt: skip


def workload(name, owner=None, queue="research", priority=0, created="2026-11-22T00:00:00Z", **conditions):
    """What Kueue keeps of a job, as the API server sends it."""
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "creationTimestamp": created,
                     "ownerReferences": [{"uid": owner or name}]},
        "spec": {"queueName": queue, "priority": priority},
        "status": {"conditions": [{"type": kind, **value} for kind, value in conditions.items()]},
    }  # fmt: skip


def content():
    """An empty namespace, for `Kubernetes`."""
    kinds = ("pytorchjobs", "workloads", "events")
    return {"pods": [], "logs": {}, "configmaps": {}} | {kind: (200, []) for kind in kinds}


def kubeconfig(port):
    """The kubeconfig of a server on this machine."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "users": [{"name": "me", "user": {}}],
    }


class Kubernetes(BaseHTTPRequestHandler):
    """Pods, their logs, one text for each connection, and lists of other kinds, from `server.content`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        parts = urlparse(self.path).path.split("/")
        content = self.server.content
        match parts[parts.index("namespaces") + 2 :]:
            case ["pods"]:
                self.answer(200, {"items": content["pods"]})
            case ["pods", name]:
                found = next((item for item in content["pods"] if item["metadata"]["name"] == name), None)
                self.answer(200 if found else 404, found or {"message": f"pods {name} not found"})
            case ["pods", name, "log"]:
                parts = content["logs"][name]
                if isinstance(parts, tuple):
                    return self.answer(parts[0], {"message": parts[1]})
                self.send_response(200)
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write((parts.pop(0) if len(parts) > 1 else parts[0]).encode())
                self.close_connection = True
                self.server.read.append(name)
            case ["configmaps", name]:
                status, data = content["configmaps"].get(name, (404, {}))
                self.answer(status, {"data": data, "message": "you may not"})
            case [kind]:
                status, items = content[kind]
                self.answer(status, {"items": items, "message": "you may not"})
        self.server.after()

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def pods_of(server, *items):
    server.content["pods"] = list(items)
    return Namespace(NAMESPACE).pods("run")


def literal(uri):
    return literals_pb2.Literal(scalar=literals_pb2.Scalar(blob=literals_pb2.Blob(uri=uri)))


def literals(values):
    return literals_pb2.LiteralMap(literals={name: literal(uri) for name, uri in values.items()})


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Executions of a project, in memory; `refusal` is what the next `refusals` calls are answered instead."""

    def __init__(self):
        self.executions, self.terminated, self.created, self.listed, self.pages = {}, [], [], [], 0
        self.inputs, self.outputs, self.nodes, self.attempts, self.plans, self.active = {}, {}, {}, {}, set(), None
        self.refusal, self.refusals = None, 0
        self.before_create = lambda name: None
        self.lost_answers, self.lock = 0, threading.Lock()
        self.token, self.refused = None, []
        self.metadata = AuthMetadata()

    def CreateExecution(self, request, context):
        self._require_token(context)
        self.before_create(request.name)
        with self.lock:
            if request.name in self.executions:
                context.abort(grpc.StatusCode.ALREADY_EXISTS, "there is one")
            self.add(request.name, core_pb2.WorkflowExecution.QUEUED)
            self.executions[request.name].spec.CopyFrom(request.spec)
            self.inputs[request.name] = request.inputs
            self.created.append(request)
            if self.lost_answers:
                self.lost_answers -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        return execution_pb2.ExecutionCreateResponse(id=self.executions[request.name].id)

    def GetLaunchPlan(self, request, context):
        if request.id.version not in self.plans:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such version")
        return launch_plan_pb2.LaunchPlan(id=request.id)

    def GetActiveLaunchPlan(self, request, context):
        self._require_token(context)
        if self.active is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "none is active")
        its = request.id
        identifier = identifier_pb2.Identifier(
            resource_type="LAUNCH_PLAN", project=its.project, domain=its.domain, name=its.name, version=self.active
        )
        return launch_plan_pb2.LaunchPlan(id=identifier)

    def GetExecutionData(self, request, context):
        self._require_token(context)
        return execution_pb2.WorkflowExecutionGetDataResponse(
            full_outputs=literals(self.outputs.get(request.id.name, {})),
            full_inputs=self.inputs.get(request.id.name),
        )

    def ListNodeExecutions(self, request, context):
        nodes = self.nodes.get((request.workflow_execution_id.name, request.unique_parent_id), {})
        found = []
        for name, is_parent in nodes.items():
            identifier = identifier_pb2.NodeExecutionIdentifier(
                node_id=name, execution_id=request.workflow_execution_id
            )
            metadata = node_execution_pb2.NodeExecutionMetaData(is_parent_node=is_parent)
            found.append(node_execution_pb2.NodeExecution(id=identifier, metadata=metadata))
        return node_execution_pb2.NodeExecutionList(node_executions=found)

    def ListTaskExecutions(self, request, context):
        return task_execution_pb2.TaskExecutionList(
            task_executions=self.attempts.get(request.node_execution_id.node_id, [])
        )

    def GetTaskExecutionData(self, request, context):
        node = request.id.node_execution_id.node_id
        # Like flyteadmin, which answers with none where the store has lost them.
        return task_execution_pb2.TaskExecutionGetDataResponse(full_inputs=self.inputs.get(node))

    def attempt(self, node, task, number, phase, began=None, seconds=0, updated=0):
        """An attempt of a task that began so many seconds after its execution's day."""
        identifier = identifier_pb2.TaskExecutionIdentifier(
            task_id=identifier_pb2.Identifier(resource_type="TASK", name=task),
            node_execution_id=identifier_pb2.NodeExecutionIdentifier(node_id=node),
            retry_attempt=number,
        )
        closure = task_execution_pb2.TaskExecutionClosure(phase=phase)
        if began is not None:
            closure.started_at.FromDatetime(datetime(2026, 11, 22) + timedelta(seconds=began))
        closure.duration.FromTimedelta(timedelta(seconds=seconds))
        closure.updated_at.FromDatetime(datetime(2026, 11, 22) + timedelta(seconds=updated))
        self.attempts.setdefault(node, []).append(task_execution_pb2.TaskExecution(id=identifier, closure=closure))

    def GetNodeExecutionData(self, request, context):
        return node_execution_pb2.NodeExecutionGetDataResponse(
            full_outputs=literals(self.outputs.get(request.id.node_id, {}))
        )

    def add(self, name, phase, label=None, error=None, owner=None):
        spec = execution_pb2.ExecutionSpec(
            launch_plan=identifier_pb2.Identifier(resource_type="LAUNCH_PLAN", name="workflows.finetune.finetune")
        )
        if label:
            spec.labels.values["strata/run"] = label
        if owner:
            spec.labels.values["strata/owner"] = owner
        closure = execution_pb2.ExecutionClosure(phase=phase)
        closure.created_at.FromDatetime(datetime(2026, 11, 22) + timedelta(seconds=len(self.executions)))
        if error:
            closure.error.message = error
        identifier = identifier_pb2.WorkflowExecutionIdentifier(project="flytesnacks", domain="development", name=name)
        self.executions[name] = execution_pb2.Execution(id=identifier, spec=spec, closure=closure)

    def _require_token(self, context):
        if self.token and ("flyte-authorization", f"Bearer {self.token}") not in context.invocation_metadata():
            self.refused.append(grpc.StatusCode.UNAUTHENTICATED)
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")

    def GetExecution(self, request, context):
        self._require_token(context)
        if self.refusals:
            self.refusals -= 1
            context.abort(*self.refusal)
        if request.id.name not in self.executions:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is none")
        return self.executions[request.id.name]

    def ListExecutions(self, request, context):
        self._require_token(context)
        self.pages += 1
        self.listed.append(request.id.project)
        newest = sorted(self.executions.values(), key=lambda found: -found.closure.created_at.seconds)
        if request.filters:
            # value_in(phase,A;B), as flyteadmin reads it.
            kind, field, values = re.fullmatch(r"(.+)\((.+),\s?(.+)\)", request.filters).groups()
            assert (kind, field) == ("value_in", "phase")
            wanted = {core_pb2.WorkflowExecution.Phase.Value(name) for name in values.split(";")}
            newest = [found for found in newest if found.closure.phase in wanted]
        first = int(request.token or 0)
        token = str(first + request.limit) if len(newest) > first + request.limit else ""
        return execution_pb2.ExecutionList(executions=newest[first : first + request.limit], token=token)

    def TerminateExecution(self, request, context):
        self._require_token(context)
        self.terminated.append(request.id.name)
        self.executions[request.id.name].closure.phase = core_pb2.WorkflowExecution.ABORTED
        return execution_pb2.ExecutionTerminateResponse()


class AuthMetadata(auth_pb2_grpc.AuthMetadataServiceServicer):
    """Tells clients in which header Flyte expects their token, and where there is one."""

    def __init__(self):
        self.token_endpoint = self.device_endpoint = ""

    def GetPublicClientConfig(self, request, context):
        return auth_pb2.PublicClientAuthConfigResponse(authorization_metadata_key="flyte-authorization")

    def GetOAuth2Metadata(self, request, context):
        return auth_pb2.OAuth2MetadataResponse(
            token_endpoint=self.token_endpoint, device_authorization_endpoint=self.device_endpoint
        )


class Tokens(BaseHTTPRequestHandler):
    """A server of tokens for the client `me`, whose secret is in its `secret`; `asked` are the forms that were sent."""

    def do_POST(self):
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.server.asked.append({name: value for name, [value] in form.items()})
        known = base64.b64encode(f"me:{quote_plus(self.server.secret)}".encode()).decode()
        is_known = self.headers["Authorization"] == f"Basic {known}"
        answer = {"access_token": self.server.token, "expires_in": 60} if is_known else {"error": "invalid_client"}
        body = json.dumps(answer).encode()
        self.send_response(200 if is_known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass
