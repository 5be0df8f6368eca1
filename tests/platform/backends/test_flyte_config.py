"""Flyte's configuration is read as flytekit reads it."""

import pytest
from flytekit.configuration import AuthType, DataConfig, PlatformConfig
from flytekit.configuration.file import get_config_file

from strata_platform.backends.flyte_config import FlyteConfig

YAML = """
admin: {endpoint: 'dns:///flyte.example:443', insecure: false, insecureSkipVerify: true, caCertFilePath: /ca.pem,
        authType: Pkce, proxyCommand: [gcloud, token], httpProxyURL: 'http://proxy', clientId: me,
        scopes: [all, offline], audience: flyte}
console: {endpoint: 'https://console.example'}
storage: {connection: {endpoint: 'http://minio:9000', access-key: a, secret-key: b}}
"""
INI = """
[platform]
url = flyte.example
insecure = True
[credentials]
client_secret = s
scopes = all,offline
[aws]
endpoint = http://minio:9000
access_key_id = a
"""
VARIABLES = {
    "FLYTE_PLATFORM_URL": "dns:///other",
    "FLYTE_PLATFORM_INSECURE": "true",
    "FLYTE_AWS_SECRET_ACCESS_KEY": "c",
    "FLYTE_CREDENTIALS_CLIENT_ID": "you",
    "FLYTE_CREDENTIALS_CLIENT_SECRET": "t",
    "FLYTE_CREDENTIALS_SCOPES": "few",
}


@pytest.mark.parametrize("variables", [{}, VARIABLES, {"FLYTE_PLATFORM_INSECURE": "0"}], ids=["file", "all", "off"])
@pytest.mark.parametrize(
    ("name", "text"),
    [("config.yaml", YAML), ("config.yaml", "admin: {endpoint: 'dns:///x', insecure: true}"), ("config", INI),
     ("config.yaml", None), ("flytekit.config", INI)],
    ids=["all fields", "few fields", "ini", "no file", "in this folder"],
)  # fmt: skip
@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
def test_flytekit_reads_the_same(tmp_path, monkeypatch, variables, name, text, named):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FLYTECTL_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    file = tmp_path / name if name == "flytekit.config" else tmp_path / ".flyte" / name
    file.parent.mkdir(exist_ok=True)
    if text is not None:
        file.write_text(text)
        if named:
            monkeypatch.setenv("FLYTECTL_CONFIG", str(file))
    get_config_file.cache_clear()
    ours, platform, data = FlyteConfig.read(), PlatformConfig.auto(), DataConfig.auto()
    assert (ours.endpoint, ours.insecure) == (platform.endpoint, platform.insecure)
    assert (ours.skip_verify, ours.ca_file) == (platform.insecure_skip_verify, platform.ca_cert_file_path)
    assert (ours.console, ours.proxied) == (platform.console_endpoint, bool(platform.proxy_command))
    assert (ours.http_proxy, ours.audience) == (platform.http_proxy_url, platform.audience)
    assert (ours.client_id, ours.client_secret) == (platform.client_id, platform.client_credentials_secret)
    assert [*ours.scopes] == platform.scopes
    assert ours.auth_mode == (None if platform.auth_mode is AuthType.STANDARD else platform.auth_mode)
    theirs = (data.s3.endpoint, data.s3.access_key_id, data.s3.secret_access_key)
    assert (ours.store_endpoint, ours.store_key, ours.store_secret) == theirs
