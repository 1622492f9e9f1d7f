"""HTTPS, the path below a proxy, and the level of the log."""

import shutil
import ssl
import subprocess

import httpx
import pytest

from nanovllm.serving.server.preparing import prepared
from nanovllm.serving.server.settings import ServerSettings
from tests.support.serving import serving

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    files = {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", files["ssl_keyfile"], "-out", files["ssl_certfile"]],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


@needs_openssl
def test_answers_and_streams_come_over_https(certificate):
    context = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    with serving(certificate) as running:
        url = running.url.replace("http://", "https://")
        with httpx.Client(base_url=url, verify=context, timeout=60.0) as client:
            body = {"prompt": [5, 6], "max_tokens": 4, "temperature": 0}
            whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            streamed = client.post("/v1/completions", json=body | {"stream": True})
            assert whole and streamed.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{running.url}/health", timeout=5.0)


@needs_openssl
def test_files_that_are_no_certificate_are_named_before_a_model_is_loaded(certificate, tmp_path):
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for files, said in (
        (certificate | {"ssl_keyfile": str(tmp_path / "missing.pem")}, "missing.pem"),
        (certificate | {"ssl_certfile": str(wrong)}, "wrong.pem"),
        (certificate | {"ssl_keyfile": str(wrong)}, "wrong.pem"),
    ):
        with pytest.raises((OSError, ValueError), match=said), prepared(ServerSettings(port=0, **files)):
            pass
    with prepared(ServerSettings(port=0, **certificate)) as listeners:
        assert listeners


def test_a_certificate_needs_its_key():
    with pytest.raises(ValueError, match="ssl_keyfile is set, but ssl_certfile is not"):
        ServerSettings(ssl_keyfile="key.pem")


def test_a_path_below_a_proxy_may_be_removed_or_not():
    with serving({"root_path": "/llm"}) as running:
        for prefix in ("", "/llm"):
            assert running.get(f"{prefix}/health").status_code == 200
            answer = running.post(f"{prefix}/v1/completions", {"prompt": [5], "max_tokens": 2})
            assert answer.status_code == 200
            assert list(running.post(f"{prefix}/api/chat", {}).json()) == ["error"]
            assert isinstance(running.post(f"{prefix}/api/chat", {}).json()["error"], str)
        assert running.get("/other/health").status_code == 404
        assert running.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a b"])
def test_other_paths_are_refused(path):
    with pytest.raises(ValueError, match="root_path"):
        ServerSettings(root_path=path)
