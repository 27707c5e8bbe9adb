"""Names in `Host` and `Origin`: how they are read, and which a loopback server takes."""

from __future__ import annotations

import pytest

from ds4.server.hosts import HostPolicy, host_name, is_loopback


@pytest.mark.parametrize(
    ("authority", "name"),
    [
        ("localhost", "localhost"),
        ("LOCALHOST:8000", "localhost"),
        ("a.example.", "a.example"),
        ("127.0.0.1:1", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[::1]:80", "::1"),
        ("name:", "name"),
        ("", None),
        (":80", None),
        ("name:80x", None),
        ("name:8:0", None),
        ("[::1", None),
        ("[::1]x", None),
        ("[]", None),
        ("user@localhost", None),
        ("localhost/evil", None),
        ("localhost\\.evil", None),
        ("localhost,evil", None),
        ("localhost evil", None),
        ("localhost#evil", None),
    ],
)
def test_host_name(authority: str, name: str | None):
    assert host_name(authority) == name


def test_loopback():
    assert is_loopback("127.0.0.1") and is_loopback("127.8.8.8") and is_loopback("::1")
    assert not is_loopback("0.0.0.0") and not is_loopback("::") and not is_loopback("192.168.1.1")
    assert not is_loopback("fe80::1%eth0")


def test_names_of_a_loopback_server():
    policy = HostPolicy("127.0.0.2", ("box", "2001:db8::1"))
    for host in ("localhost", "127.0.0.1:1", "[::1]", "127.0.0.2", "BOX:99", "[2001:db8::1]:5"):
        assert policy.refusal({"host": host}, "1.1") is None, host
        assert policy.refusal({"host": host}, "1.1") is None, "the second time by memory"
    for host in ("evil", "127.0.0.3", "box.evil", ""):
        for _ in range(2):
            refusal = policy.refusal({"host": host}, "1.1")
            assert refusal is not None and refusal[0] == 403, host


def test_no_memory_grows_with_foreign_or_many_names():
    policy = HostPolicy("127.0.0.1")
    for i in range(1000):
        assert policy.refusal({"host": f"evil{i}"}, "1.1") is not None
        assert policy.refusal({"host": f"localhost:{i}"}, "1.1") is None
    assert len(policy._known) <= 64


def test_the_target_counts_in_place_of_the_header():
    policy = HostPolicy("127.0.0.1")
    assert policy.refusal({"host": "evil"}, "1.1", "localhost:1") is None
    assert policy.refusal({"host": "localhost"}, "1.1", "evil") is not None


def test_no_host():
    for address in ("127.0.0.1", "0.0.0.0"):
        refusal = HostPolicy(address).refusal({}, "1.1")
        assert refusal is not None and refusal[0] == 400
        assert HostPolicy(address).refusal({}, "1.0") is None


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:5", True),
        ("vscode-webview://abc", True),
        ("https://evil.example", False),
        ("HTTPS://evil.example", False),
        ("null", False),
        ("", False),
        ("http://", False),
        ("http://localhost@evil.example", False),
    ],
)
def test_origins(origin: str, allowed: bool):
    headers = {"host": "localhost", "origin": origin}
    assert (HostPolicy("127.0.0.1").refusal(headers, "1.1") is None) == allowed
    assert HostPolicy("127.0.0.1", cors=True).refusal(headers, "1.1") is None
    assert HostPolicy("0.0.0.0").refusal(headers, "1.1") is None
    assert HostPolicy("127.0.0.1").refusal(headers, "1.1", method="OPTIONS") is None
