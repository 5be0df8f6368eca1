"""A cluster on this machine for the tests.

    python -m tests.e2e.helpers.local_cluster build | up | down | test [PYTEST ARGUMENTS]

The folder STRATA_CLUSTER has scripts that build Kubernetes, Kueue, the training operator and Flyte as programs of this
machine and start them in a network namespace; here everything of the project is installed over that, through
charts/strata-stack. Pods see this environment's Python and packages read-only, through claims. `test` builds what is
missing, brings the cluster up, runs the tests and takes it down, whatever happens. Needs root on Linux.
"""

from __future__ import annotations

import compileall
import fcntl
import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from strata_platform.chart import keep_kinds
from tests.e2e.helpers import job_set_controller, upstream_flyte
from tests.platform.helpers import fake_nvml

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(os.environ.get("STRATA_CLUSTER", "")).absolute()
STATE = Path(os.environ.get("KC", "/tmp/kc")).absolute()
STACK = STATE / "strata-stack"
RUNS = STATE / "runs"
FLYTE_CONFIG = STATE / "flyte.yaml"
DATABASE = STATE / "database"
BACKUP = STATE / "flyte.dump"
PROVIDER = STATE / "identity-provider"
CLIENT_SECRET = "strata-flyte-client"
NAMESPACE = "strata-system"
RELEASE = (str(STACK), "--namespace", NAMESPACE, "--values", str(ROOT / "tests/e2e/values.yaml"), "--values", "-")
# The image of tasks, and where it has their code.
IMAGE, WORK = "strata", "app"
TENANTS = ("flytesnacks-development", "rival-development")
# Addresses of that cluster, which its scripts choose.
STORE, FLYTE, NAMES = "10.88.0.1", "10.96.0.81", "10.96.0.10"
BRIDGE = "0a:58:0a:58:00:01"
# Of a second store, in which each tenant has an account.
ACCOUNTS = 9002
# Folders of this machine that pods see read-only, at the same paths. The code of a working copy travels with it.
SEEN = {
    "usr": Path("/usr"),
    "python": Path(sys.base_prefix),
    "venv": Path(sys.prefix),
    "kernels": ROOT / "kernels",
    "platform": ROOT / "platform",
    # Where this environment's editable installation finds them: releases and runs without Flyte import these. A working
    # copy is unpacked over the image's code, which comes first.
    "tasks": ROOT / "tasks",
    "workflows": ROOT / "workflows",
    # NVML of GPUs that a file describes.
    "nvml": STATE / "nvml",
}
# The machine is busy: a slow answer is none of a dead server, and servers get their share.
PATIENT = {"timeoutSeconds": 15, "failureThreshold": 8, "periodSeconds": 2}
SHARE = {"requests": {"cpu": "50m", "memory": "64Mi"}}
# Seconds that a phase may take, or a command of a client. A cold build is 15 to 30 minutes of two cores; of a machine
# that others use, a client may get a twentieth.
LIMITS = {"build": 2100, "images": 120, "up": 180, "module": 300, "install": 360, "client": 180, "down": 60}
EXIT_CANNOT = 75


class CannotError(Exception):
    """This machine cannot have the cluster: no network, no root, no room. It says nothing about the project."""


def script(name: str, limit: float) -> None:
    """Run one of the cluster's scripts."""
    print(f"cluster: {name}", flush=True)
    shell([str(SCRIPTS / name)], limit=limit)


def shell(command: list[str], *, limit: float, text: str | None = None) -> str:
    """Run a command and return what it wrote to its standard output. Raises CalledProcessError and TimeoutExpired."""
    with started(command, stdin=subprocess.PIPE if text is not None else None, stdout=subprocess.PIPE) as process:
        said, _ = process.communicate(text, timeout=limit)
    if process.returncode:
        print(said[-4000:])
        raise subprocess.CalledProcessError(process.returncode, command)
    return str(said)


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A command with all that it starts, which ends with the block at the latest."""
    options = {"stdin": subprocess.DEVNULL, **{name: to for name, to in options.items() if to is not None}}
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    try:
        yield process
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def inside(*command: str, limit: float = LIMITS["client"], text: str | None = None) -> str:
    """Run a client in the cluster's network."""
    return shell([str(SCRIPTS / "ns.sh"), *command], limit=limit, text=text)


@contextmanager
def alone(patience: float = 600) -> Iterator[None]:
    """Keep other processes from the cluster; what a killed one left is not locked."""
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / "lock").open("w") as file:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise CannotError(f"another process has had the cluster of {STATE} for {patience:.0f} s") from None
                time.sleep(1)
        yield


def build() -> None:
    """The cluster's programs and images, unless they are there."""
    if not (SCRIPTS / "build.sh").is_file():
        raise CannotError(f"{SCRIPTS} has no build.sh; set STRATA_CLUSTER as docs/cluster-tests.md says")
    if os.geteuid():
        raise CannotError("only root may make namespaces and mounts")
    try:
        script("build.sh", LIMITS["build"])
        script("images.sh", LIMITS["images"])
        pack()
        (STATE / "images" / f"{upstream_flyte.IMAGE}.tar").unlink(missing_ok=True)
        if upstream_flyte.PROGRAM:
            upstream_flyte.pack(SCRIPTS, STATE / "images")
            upstream_flyte.install_provider(PROVIDER)
        job_set_controller.build(SCRIPTS, STATE)
        SEEN["nvml"].mkdir(exist_ok=True)
        fake_nvml.build(SEEN["nvml"])
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotError(f"the cluster's programs cannot be built here: {error}") from error


def pack() -> None:
    """The image of tasks: an empty system that sees this machine's Python, with the code where the Dockerfile has it,
    compiled as there. A working copy is unpacked over it.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("usr", "etc", "tmp", "proc", "sys", "dev", "var/tmp", "home"):
            (root / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        users = "root:x:0:0:root:/root:/bin/sh\nstrata:x:1000:1000:strata:/tmp:/bin/sh\n"
        (root / "etc/passwd").write_text(users)
        (root / "etc/group").write_text("root:x:0:\nstrata:x:1000:\n")
        (root / "etc/nsswitch.conf").write_text("hosts: files dns\n")
        for name in ("tasks", "workflows"):
            shutil.copytree(ROOT / name, root / WORK / name, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(
            root / WORK, quiet=1, stripdir=root, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
        )
        for place in (root, root / "tmp", root / "var/tmp"):
            place.chmod(0o755 if place == root else 0o1777)
        # Pods have a user of their own.
        for place in (root / WORK, *(root / WORK).rglob("*")):
            place.chmod(0o777 if place.is_dir() else 0o666)
        made = [f"registry.local/{IMAGE}:1", str(STATE / "images" / f"{IMAGE}.tar"), "1000"]
        subprocess.run(["python3", str(SCRIPTS / "mkimage.py"), root, *made], check=True, timeout=120)


def up() -> None:
    """A new cluster with everything installed."""
    down()
    try:
        script("up.sh", LIMITS["up"])
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotError(f"the cluster does not start here: {error}") from error
    # A bridge without an address of its own takes the lowest of its ports', another one whenever pods come and go: for
    # the most of a minute the others then know no way to the stores and the API server.
    inside("ip", "link", "set", "cni0", "address", BRIDGE, limit=10)
    job_set_controller.start_names(SCRIPTS, STATE)
    if upstream_flyte.PROGRAM:
        upstream_flyte.start_database(inside, DATABASE, STORE)
        upstream_flyte.start_provider([str(SCRIPTS / "ns.sh")], PROVIDER, STORE)
    install()


def down() -> None:
    """Take the cluster away, also one that a killed process left. What remains is told, and is no error."""
    database = partial(upstream_flyte.stop_database, lambda *command: shell([*command], limit=30), DATABASE)
    provider = partial(upstream_flyte.stop_provider, PROVIDER)
    for end in (partial(script, "down.sh", LIMITS["down"]), database, provider):
        try:
            end()
        except (OSError, subprocess.SubprocessError) as error:
            print(f"cluster: not all of it is gone: {error}", file=sys.stderr)
    shutil.rmtree(RUNS, ignore_errors=True)


def install() -> None:
    """The training operator's manifests, then the stack in its two steps, then the claims of its pods."""
    operator = module("github.com/kubeflow/training-operator@v1.9.3") / "manifests" / "overlays" / "standalone"
    manifests = list(yaml.safe_load_all(inside("kubectl", "kustomize", str(operator))))
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            container |= {"image": "registry.local/training-operator:1", "resources": SHARE}
            for probe in ("livenessProbe", "readinessProbe"):
                container[probe] |= PATIENT | {"initialDelaySeconds": 1}
    apply(*manifests)
    vendor()
    # Before Kueue, which looks for the kinds that it manages.
    jobset = {"image": image("jobset"), "controller": {"resources": SHARE}}
    chart = str(module(job_set_controller.MODULE) / "charts" / "jobset")
    own = ["helm", "install", "jobset", chart, "--namespace", "jobset-system", "--create-namespace", "--values", "-"]
    inside(*own, text=yaml.safe_dump(jobset))
    if not upstream_flyte.PROGRAM:
        apply(*stand_in_rights())
    install_stack()
    # As in an image. Pods see them read-only, and each of their processes would compile them again.
    for name in ("kernels", "platform", "tasks", "workflows"):
        compileall.compile_dir(SEEN[name], quiet=1)
    RUNS.mkdir(mode=0o777, parents=True)
    apply(*claims())
    inside("kubectl", "-n", "kubeflow", "rollout", "status", "deploy/training-operator", "--timeout=170s")
    admin: dict[str, Any] = {"endpoint": f"dns:///{FLYTE}:8089", "insecure": True}
    if upstream_flyte.PROGRAM:
        admin = upstream_flyte.client_configuration(FLYTE, STATE)
        apply(upstream_flyte.client_secret(CLIENT_SECRET, NAMESPACE))
    FLYTE_CONFIG.write_text(yaml.safe_dump({"admin": admin}))


def install_stack() -> None:
    """The stack, as its README says."""
    later = ["--set", "components.flyte=false,components.strata=false"]
    first = ["helm", "install", "strata", *RELEASE, "--create-namespace", *later, "--wait"]
    inside(*first, limit=LIMITS["install"], text=yaml.safe_dump(own_values()))
    upgrade(own_values(), "--wait")


def upgrade_stack() -> None:
    """An upgrade that starts Flyte and Kueue anew, as one to other versions does."""
    values, anew = own_values(), {"upgraded": str(time.time_ns())}
    values["flyte-binary"]["deployment"]["podAnnotations"] = anew
    values["kueue"]["controllerManager"]["manager"]["podAnnotations"] = anew
    upgrade(values, "--wait")


def remove_stack() -> None:
    """The stack, as docs/upgrade.md says."""
    inside("helm", "uninstall", "strata", "--namespace", NAMESPACE, "--wait", limit=LIMITS["install"])


def back_up_flyte() -> None:
    """Flyte's state, as docs/backup.md says."""
    upstream_flyte.back_up_database(inside, BACKUP, STORE)


def restore_flyte() -> None:
    """An empty database, and in it the state that was backed up."""
    flyte = ("kubectl", "--namespace", NAMESPACE)
    inside(*flyte, "scale", "deploy/flyte-binary", "--replicas=0")
    mine = "--selector=app.kubernetes.io/name=flyte-binary"
    inside(*flyte, "wait", "pods", mine, "--for=delete", "--timeout=170s")
    upstream_flyte.restore_database(inside, BACKUP, STORE)
    inside(*flyte, "scale", "deploy/flyte-binary", "--replicas=1")
    inside(*flyte, "rollout", "status", "deploy/flyte-binary", "--timeout=170s")


def upgrade(values: dict[str, Any], *options: str) -> None:
    """All of the stack with these values; Kueue's webhooks answer a moment after it is ready."""
    command = ["helm", "upgrade", "strata", *RELEASE, *options]
    patiently(lambda: inside(*command, limit=LIMITS["install"], text=yaml.safe_dump(values)), 5, 10, 20)
    # The pods' image has no tini: their program must not be process 1, which signals without a handler pass by.
    shared = '{"template": {"spec": {"shareProcessNamespace": true}}}'
    for tenant in TENANTS:
        inside("kubectl", "-n", tenant, "patch", "podtemplate", "strata", "--type=merge", f"--patch={shared}")


def module(version: str) -> Path:
    """Where the files of a Go module lie."""
    try:
        return Path(json.loads(shell(["go", "mod", "download", "-json", version], limit=LIMITS["module"]))["Dir"])
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotError(f"the charts of {version} are not to be had: {error}") from error


def vendor() -> None:
    """The stack with its dependencies, whose charts are those of the programs' own sources."""
    flyte = module("github.com/flyteorg/flyte@v1.16.8") / "charts"
    charts = {
        "": ROOT / "charts" / "strata-stack",
        "charts/strata": ROOT / "charts" / "strata",
        "charts/flyte-binary": flyte / "flyte-binary",
        # Optional, and to be there all the same.
        "charts/flyte-binary/charts/flyteconnector": flyte / "flyteconnector",
        "charts/kueue": module("sigs.k8s.io/kueue@v0.19.0") / "charts" / "kueue",
    }
    shutil.rmtree(STACK, ignore_errors=True)
    # What `helm dependency update` has fetched into a working tree are second copies.
    fetched = shutil.ignore_patterns("*.tgz")
    for place, source in charts.items():
        # Modules are read-only, the copies must not be.
        shutil.copytree(source, STACK / place, copy_function=shutil.copyfile, dirs_exist_ok=True, ignore=fetched)
        (STACK / place).chmod(0o755)
    keep_kinds.keep(STACK)
    leave_out_absent(STACK)


def leave_out_absent(stack: Path) -> None:
    """Take out of a stack's Chart.yaml what is off and not there: Helm asks for every chart in it, on or off.

    It is monitoring, whose chart is in no Go module. What is on stays, and Helm says that it is missing.
    """
    on = yaml.safe_load((stack / "values.yaml").read_text())["components"]
    meta = yaml.safe_load((stack / "Chart.yaml").read_text())
    meta["dependencies"] = [
        item
        for item in meta["dependencies"]
        if on[item["condition"].removeprefix("components.")] or (stack / "charts" / item["name"]).is_dir()
    ]
    (stack / "Chart.yaml").write_text(yaml.safe_dump(meta, sort_keys=False))


def own_values() -> dict[str, Any]:
    """What this cluster has for images, an object store, and volumes."""
    volumes = [{"name": name, "claim": name, "mountPath": str(path), "readOnly": True} for name, path in SEEN.items()]
    runs = {"name": "runs", "claim": "runs", "mountPath": "/runs"}
    env = {
        "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": f"{SEEN['kernels']}:{SEEN['platform']}",
        "HOME": "/tmp",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    store = {"region": "us-east-1", "disableSSL": True, "v2Signing": False, "endpoint": f"http://{STORE}:9000"}
    keys = {"authType": "accesskey", "accessKey": "test", "secretKey": "testsecret"}
    for_pods = [{name: value} for name, value in store_environment().items()]
    flyte = {
        "flyte-core-components": {"admin": {"disableScheduler": True}},
        "configuration": {
            "database": {"host": "none"},
            "storage": {
                "metadataContainer": "flyte",
                "userDataContainer": "flyte",
                "provider": "s3",
                "providerConfig": {"s3": store | keys},
            },
            "inline": {
                "propeller": {"workflow-reeval-duration": "5s", "downstream-eval-duration": "2s"},
                "catalog-cache": {"type": "noop"},
                "storage": {"enable-multicontainer": True},
                "plugins": {"k8s": {"default-env-vars": for_pods}},
            },
        },
        "deployment": {
            "image": image("flyte"),
            "waitForDB": {"image": image("busybox"), "command": ["true"]},
            "extraEnvVars": [{"name": "FLYTE_WEBHOOK", "value": "1"}],
            "livenessProbe": {"httpGet": {"path": "/healthcheck", "port": "http"}, **PATIENT},
            "readinessProbe": {"httpGet": {"path": "/healthcheck", "port": "http"}, **PATIENT},
            "resources": SHARE,
        },
        "ingress": {"separateGrpcIngress": False},
        "service": {"clusterIP": FLYTE},
    }
    if upstream_flyte.PROGRAM:
        upstream_flyte.configure(flyte, STORE, FLYTE, [tenant.removesuffix("-development") for tenant in TENANTS])
    kueue = {
        "manager": {"image": image("kueue"), "resources": SHARE | {"limits": {"cpu": "2", "memory": "1Gi"}}},
        "livenessProbe": PATIENT,
        "readinessProbe": PATIENT | {"initialDelaySeconds": 1},
    }
    network = {
        "objectStore": [{"cidr": f"{STORE}/32", "ports": [{"port": 9000}, {"port": ACCOUNTS}]}],
        "dns": [{"cidr": f"{NAMES}/32", "ports": [{"port": 53}, {"port": 53, "protocol": "UDP"}]}],
    }
    login = CLIENT_SECRET if upstream_flyte.PROGRAM else ""
    return {
        "flyte-binary": flyte,
        "kueue": {"controllerManager": kueue},
        "strata": {
            "image": {"repository": f"registry.local/{IMAGE}", "tag": "1"},
            # The chart of Flyte has one service where there is one ingress.
            "queues": {"timeout": {"flyte": f"{FLYTE}:8089", "secret": login}},
            "tenantDefaults": {
                "network": network,
                "podTemplate": {"workingDir": f"/{WORK}", "env": env, "volumes": [*volumes, runs]},
            },
            "tests": {"env": env, "volumes": volumes, "reachable": [f"{STORE}:9000"]},
        },
    }


def stand_in_rights() -> Iterator[dict[str, Any]]:
    """What the stand-in for flyteadmin does and flyteadmin does not: it creates the namespace of each run."""
    api = "rbac.authorization.k8s.io"
    common = {"apiVersion": f"{api}/v1", "metadata": {"name": "flyte-stand-in"}}
    rule = {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["create"]}
    yield common | {"kind": "ClusterRole", "rules": [rule]}
    yield common | {
        "kind": "ClusterRoleBinding",
        "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": "flyte-stand-in"},
        "subjects": [{"kind": "ServiceAccount", "name": "flyte-binary", "namespace": NAMESPACE}],
    }


def image(name: str) -> dict[str, str]:
    """An image that the scripts made."""
    return {"repository": f"registry.local/{name}", "tag": "1", "pullPolicy": "IfNotPresent"}


def store_environment() -> dict[str, str]:
    """How Flyte's clients reach the object store."""
    return {
        "FLYTE_AWS_ENDPOINT": f"http://{STORE}:9000",
        "FLYTE_AWS_ACCESS_KEY_ID": "test",
        "FLYTE_AWS_SECRET_ACCESS_KEY": "testsecret",
    }


def claims() -> Iterator[dict[str, Any]]:
    """Volumes of this machine's folders, and each namespace's claims to them."""
    for namespace in (NAMESPACE, *TENANTS):
        folders = dict(SEEN)
        if namespace in TENANTS:
            folders["runs"] = RUNS / namespace
            folders["runs"].mkdir()
            folders["runs"].chmod(0o777)
        for name, folder in folders.items():
            volume = f"{namespace}-{name}"
            common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
            yield {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": volume},
                "spec": {
                    **common,
                    "capacity": {"storage": "1Gi"},
                    "hostPath": {"path": str(folder)},
                    "claimRef": {"namespace": namespace, "name": name},
                },
            }
            yield {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {**common, "volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}},
            }


def apply(*manifests: dict[str, Any]) -> None:
    """Hand manifests to the cluster."""
    inside("kubectl", "apply", "--server-side", "-f", "-", text=yaml.safe_dump_all(manifests))


def patiently(do: Callable[[], object], *pauses: float) -> None:
    """Do what fails until a server answers, again after each pause; its error after the last."""
    for pause in pauses:
        try:
            do()
            return
        except subprocess.CalledProcessError:
            time.sleep(pause)
    do()


@contextmanager
def accounts() -> Iterator[str]:
    """Where an object store answers that has an account and a bucket of each tenant, both by the tenant's name."""
    endpoint, gateway = f"http://{STORE}:{ACCOUNTS}", str(STATE / "bin" / "versitygw")
    root = ["--access", "root", "--secret", "rootsecret"]
    with tempfile.TemporaryDirectory() as users, tempfile.TemporaryDirectory() as data:
        serve = [gateway, *root, "--port", f"{STORE}:{ACCOUNTS}", "--iam-dir", users, "posix", data]
        # It would print every request.
        with started([str(SCRIPTS / "ns.sh"), *serve], stdout=subprocess.DEVNULL) as process:
            try:
                for tenant in TENANTS:
                    admin = [gateway, "admin", *root, "--endpoint-url", endpoint]
                    user = [*admin, "create-user", "--access", tenant, "--secret", f"{tenant}-secret", "--role", "user"]
                    patiently(partial(inside, *user), 0.2, 0.5, 1, 2, 5)
                    inside(*admin, "create-bucket", "--bucket", tenant, "--owner", tenant)
                yield endpoint
            finally:
                os.killpg(process.pid, signal.SIGKILL)


def run_tests(arguments: list[str]) -> int:
    """pytest in the cluster's network; its exit status."""
    os.environ.update(store_environment())
    os.environ.update(FLYTECTL_CONFIG=str(FLYTE_CONFIG), STRATA_E2E_IMAGE=f"registry.local/{IMAGE}:1")
    os.environ.update(STRATA_E2E_NVML=str(SEEN["nvml"]))
    reject = f"INPUT -d {STORE} -p tcp --dport 9000 -j REJECT --reject-with tcp-reset"
    os.environ.update(STRATA_E2E_STORE_OFF=f"iptables -I {reject}", STRATA_E2E_STORE_ON=f"iptables -D {reject}")
    again = f"cd {ROOT} && {sys.executable} -m {__spec__.name}"
    os.environ.update({f"STRATA_E2E_{verb.split('-')[0].upper()}": f"{again} {verb}" for verb in WITHIN})
    # Each test is named before it begins.
    python = [sys.executable, "-m", "pytest", "-v", "--durations=15", str(ROOT / "tests" / "e2e"), *arguments]
    status = None
    with accounts() as endpoint:
        os.environ.update(STRATA_E2E_ACCOUNTS=endpoint)
        try:
            with started([str(SCRIPTS / "ns.sh"), *python], cwd=ROOT) as process:
                status = process.wait()
        finally:
            # Whoever ends this program from outside gets to see it, too.
            if status != 0:
                show_state()
    return status


def show_state() -> None:
    """What the cluster is doing, as far as it answers."""
    for what in (["pods,workloads,jobsets"], ["events", "--sort-by=.lastTimestamp"]):
        try:
            told = inside("kubectl", "get", *what, "--all-namespaces", limit=10)
        except (OSError, subprocess.SubprocessError) as error:
            told = f"{what[0]}: {error}"
        print(told[-6000:], flush=True)


def test(arguments: list[str]) -> int:
    """Build, up, pytest, down."""
    build()
    try:
        up()
        return run_tests(arguments)
    finally:
        down()


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


WITHIN: dict[str, Callable[[], int | None]] = {
    "install-stack": install_stack,
    "upgrade-stack": upgrade_stack,
    "remove-stack": remove_stack,
} | ({"backup-flyte": back_up_flyte, "restore-flyte": restore_flyte} if upstream_flyte.PROGRAM else {})
"""What a test asks for while `test` has the cluster."""


def main(verb: str, *arguments: str) -> int:
    """Do what the command line says; the exit status."""
    signal.signal(signal.SIGTERM, _end)
    # For every script that is started from here, by helpers too: each looks below TMPDIR where KC is not set.
    os.environ.update(KC=str(STATE), VENV=sys.prefix, PYROOT=sys.base_prefix)
    verbs = {"build": build, "up": up, "down": down, "test": lambda: test([*arguments])}
    verbs |= WITHIN
    lock = nullcontext if verb in WITHIN else alone
    try:
        with lock():
            return verbs[verb]() or 0
    except CannotError as error:
        print(f"no cluster: {error}", file=sys.stderr)
        return EXIT_CANNOT


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
