"""Pictures of other servers: fetched from allowed hosts, from public addresses, in bounded time and bytes."""

import contextlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nanovllm.serving.server import media_hosts
from nanovllm.serving.server.media_hosts import RemotePicture, fetch, fetched, is_public

HOSTS = ("127.0.0.1",)
BOUNDS = (float("inf"), media_hosts.MAX_BYTES)
ANSWERS = {  # path: (status, location)
    "/picture?x=1": (200, None), "/moved": (302, "/picture?x=1"), "/round": (307, "/round"),
    "/away": (302, "http://elsewhere/a"), "/missing": (404, None),
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/slow":  # a byte of its head now and then
            with contextlib.suppress(OSError):
                for byte in b"HTTP/1.1 200 OK\r\nx: " + b"y" * 60 + b"\r\n\r\na picture":
                    time.sleep(0.05)
                    self.wfile.write(bytes([byte]))
            return
        status, target = ANSWERS[self.path]
        self.send_response(status)
        if target:
            self.send_header("location", target)
        self.end_headers()
        self.wfile.write(b"a picture" if status == 200 else b"")

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def all_public(monkeypatch):
    monkeypatch.setattr(media_hosts, "is_public", lambda address: True)


@pytest.mark.usefixtures("all_public")
def test_a_picture_is_fetched_through_redirects(server):
    for path in ("/picture?x=1", "/moved"):
        assert (
            fetch(server + path, HOSTS, time.monotonic() + media_hosts.MAX_SECONDS, media_hosts.MAX_BYTES)
            == b"a picture"
        )


@pytest.mark.usefixtures("all_public")
@pytest.mark.parametrize(
    "path, limits, error",
    [
        ("/round", {}, "more than 3 times"),
        ("/missing", {}, "answer is 404"),
        ("/away", {}, "'http://elsewhere/a' is not fetched"),
        ("/moved", {"MAX_BYTES": 4}, "over 4 bytes"),
        ("/slow", {"MAX_SECONDS": 0.4}, "over 0.4 s"),
    ],
)
def test_what_is_no_picture_or_too_much_is_an_error(path, limits, error, server, monkeypatch):
    for name, value in limits.items():
        monkeypatch.setattr(media_hosts, name, value)
    with pytest.raises(ValueError, match=error):
        fetch(server + path, HOSTS, time.monotonic() + media_hosts.MAX_SECONDS, media_hosts.MAX_BYTES)


@pytest.mark.usefixtures("all_public")
async def test_pictures_of_a_conversation_share_its_bytes(server, monkeypatch):
    parts = [{"type": "image", "image": RemotePicture(f"{server}/moved")}] * 2
    conversation = [{"role": "user", "content": parts}]
    whole = await fetched(conversation, HOSTS)
    assert [part["image"] for part in whole[0]["content"]] == [b"a picture"] * 2
    monkeypatch.setattr(media_hosts, "MAX_BYTES", 17)
    with pytest.raises(ValueError, match="over 17 bytes"):
        await fetched(conversation, HOSTS)


def test_a_private_address_is_refused_though_its_name_is_allowed(server):
    with pytest.raises(ValueError, match=r"127\.0\.0\.1 is an address of a private network"):
        fetch(f"{server}/moved", HOSTS, *BOUNDS)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/a", "http://example.org/a", "http://127.0.0.1@example.org/", "//a/b"])
def test_another_host_or_scheme_is_refused(url):
    with pytest.raises(ValueError, match="not one of --allowed-media-hosts"):
        fetch(url, HOSTS, *BOUNDS)


@pytest.mark.parametrize(
    "address, expected",
    [
        ("8.8.8.8", True), ("10.0.0.1", False), ("169.254.169.254", False), ("::1", False), ("fe80::1%eth0", False),
        ("::ffff:10.0.0.1", False), ("::ffff:8.8.8.8", True), ("2002:0a00:0001::", False), ("100.64.0.1", False),
        ("224.0.0.1", False), ("2606:4700:4700::1111", True), ("0.0.0.0", False),
    ],
)  # fmt: skip
def test_public_addresses_are_told_from_private_ones(address, expected):
    assert is_public(address) is expected
