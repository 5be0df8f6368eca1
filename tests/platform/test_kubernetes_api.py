"""Access to a cluster is what kubectl's own file says, as the official client reads it."""

import base64
import json
import ssl
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from strata_platform.kubernetes_api import Access, ApiError, KubernetesApi, NoConfiguration
from strata_platform.quantity import parse_quantity


def encoded(text):
    return base64.b64encode(text.encode()).decode()


def plugin(folder):
    """A credential plugin that answers with what it is told."""
    program = folder / "plugin.py"
    program.write_text(
        "import json, os\n"
        "told = json.loads(os.environ['KUBERNETES_EXEC_INFO'])\n"
        "status = {'token': os.environ['SECRET'] + told['kind']}\n"
        "print(json.dumps({'apiVersion': told['apiVersion'], 'kind': 'ExecCredential', 'status': status}))\n"
    )
    return {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": [str(program)],
            "env": [{"name": "SECRET", "value": "s3"}], "interactiveMode": "Never"}  # fmt: skip


USERS = {
    "nothing": {},
    "token": {"token": "t0"},
    "password": {"username": "ada", "password": "x"},
    "certificate": {"client-certificate-data": encoded("CERT"), "client-key-data": encoded("KEY")},
    "files": {"client-certificate": "cert.pem", "client-key": "key.pem"},
    "plugin": None,
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("cluster", [{"certificate-authority-data": encoded("CA")}, {"certificate-authority": "ca.pem"},
                                     {"insecure-skip-tls-verify": True}], ids=["data", "file", "insecure"])  # fmt: skip
def test_a_kubeconfig_is_read_as_the_official_client_does(tmp_path, monkeypatch, user, cluster):
    from kubernetes import client, config

    for name in ("CERT", "KEY", "CA"):
        (tmp_path / f"{name.lower()}.pem").write_text(name)
    content = {
        "current-context": "other",
        "clusters": [{"name": "c", "cluster": {"server": "https://example:6443/", **cluster}}],
        "contexts": [{"name": "mine", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": USERS[user] if user != "plugin" else {"exec": plugin(tmp_path)}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(content))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    ours, theirs = Access.of_environment("mine"), client.Configuration()
    config.load_kube_config(str(tmp_path / "config"), "mine", theirs)

    def content_of(path):
        return None if path is None else Path(path).read_bytes()

    assert ours.server == theirs.host
    assert ours.verify == theirs.verify_ssl
    assert ours.ca == content_of(theirs.ssl_ca_cert)
    pair = (content_of(theirs.cert_file), content_of(theirs.key_file))
    assert ours.certificate == (None if pair == (None, None) else pair)
    assert ours.headers.get("Authorization") == theirs.auth_settings().get("BearerToken", {}).get("value")


def test_the_first_of_several_files_decides(tmp_path, monkeypatch):
    for number, (context, server) in enumerate([("a", "http://one"), ("b", "http://two")]):
        named = {"current-context": context, "clusters": [{"name": "c", "cluster": {"server": server}}],
                 "contexts": [{"name": context, "context": {"cluster": "c", "user": "u"}}]}  # fmt: skip
        (tmp_path / str(number)).write_text(yaml.safe_dump(named))
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / '0'}:{tmp_path / 'missing'}:{tmp_path / '1'}")
    assert Access.of_environment().server == Access.of_environment("b").server == "http://one"
    with pytest.raises(NoConfiguration, match="no context 'z' in the kubeconfig, only: a, b"):
        Access.of_environment("z")


def test_without_a_file_there_is_no_configuration(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(NoConfiguration, match="there is no kubeconfig"):
        Access.of_environment()
    (tmp_path / "none").write_text("a: {")
    with pytest.raises(NoConfiguration, match="cannot be read"):
        Access.of_environment()


class Pages(BaseHTTPRequestHandler):
    """A list in pages of two, and an error."""

    def do_GET(self):
        if self.path.startswith("/gone"):
            return self.answer(410, {"message": "too old"})
        first = int(self.path.partition("continue=")[2] or 0)
        page = {"items": list(range(5))[first : first + 2], "metadata": {}}
        if first < 4:
            page["metadata"]["continue"] = str(first + 2)
        self.answer(200, page)

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_a_list_is_read_to_its_last_page(server):
    api = KubernetesApi(Access(f"http://127.0.0.1:{server.server_port}"))
    assert api.items("/things") == [0, 1, 2, 3, 4]
    with pytest.raises(ApiError, match="too old") as caught:
        api.get("/gone")
    assert (caught.value.status, caught.value.reason) == (410, "Gone")


def test_a_server_whose_certificate_another_signed_is_refused(tmp_path, server):
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def certificate():
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
        now = datetime.now(UTC)
        made = (
            x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(1))
            .not_valid_after(now + timedelta(1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("kubernetes")]), False)
            .add_extension(x509.BasicConstraints(True, None), True)
            .sign(key, hashes.SHA256())
        )  # fmt: skip
        pem = made.public_bytes(serialization.Encoding.PEM)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return pem, private

    (mine, key), (other, _) = certificate(), certificate()
    (tmp_path / "both.pem").write_bytes(mine + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both.pem")
    context.load_verify_locations(cadata=mine.decode())
    # The client shows a certificate, too.
    context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
    address = f"https://127.0.0.1:{server.server_port}"
    good = Access(address, ca=mine, server_name="kubernetes", certificate=(mine, key))
    assert KubernetesApi(good).items("/things") == [0, 1, 2, 3, 4]
    from urllib3.exceptions import HTTPError

    with pytest.raises(HTTPError, match="certificate verify failed"):
        KubernetesApi(Access(address, ca=other, server_name="kubernetes", certificate=(mine, key))).get("/things")


@pytest.mark.parametrize("text", ["0", "2", "500m", "8Gi", "1.5Ti", "1k", "3E", "2e3", "1500u", "7Ei", ".5", "5."])
def test_quantities_are_kubernetes_own(text):
    from kubernetes.utils.quantity import parse_quantity as official

    assert parse_quantity(text) == official(text)


@pytest.mark.parametrize("text", ["", "Gi", "2 Gi", "2gb", "two", "1.2.3"])
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(ValueError, match="is not a quantity of Kubernetes"):
        parse_quantity(text)
