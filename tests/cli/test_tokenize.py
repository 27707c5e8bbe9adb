"""`ds4 tokenize`: text to ids and back through the command."""

from __future__ import annotations

import argparse
import io
import json
import sys

import pytest

from ds4.cli import tokenize
from ds4.errors import ConfigError

CHAT = "<|im_start|>user\nHi \u4e2d<|im_end|>\n"


def run(monkeypatch: pytest.MonkeyPatch, stdin: bytes, *argv: str) -> int:
    parser = argparse.ArgumentParser()
    tokenize.add_parser(parser.add_subparsers())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    args = parser.parse_args(["tokenize", *argv])
    return int(args.run(args))


def test_specials_are_text_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, CHAT.encode(), "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    assert run(monkeypatch, CHAT.encode(), "--json", "--specials") == 0
    special = json.loads(capsys.readouterr().out)
    assert not {1, 2} & set(plain["ids"]) and special["ids"][0] == 1 and special["ids"][-2:] == [2, 198]
    for result in (plain, special):
        assert result["round_trip"] is True
        assert result["n_tokens"] == len(result["ids"]) and result["n_bytes"] == len(CHAT.encode())


def test_ids_back_to_text(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    run(monkeypatch, CHAT.encode(), "--json", "--specials")
    ids = json.loads(capfdbinary.readouterr().out)["ids"]
    assert run(monkeypatch, json.dumps(ids).encode(), "--decode", "--json") == 0
    assert json.loads(capfdbinary.readouterr().out)["text"] == CHAT


def test_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, b"Hello world\n") == 0
    captured = capsys.readouterr()
    assert captured.out == '19556\t"Hello"\n905\t" world"\n198\t"\\n"\n'
    assert captured.err == "3 tokens, 12 bytes, 4.00 bytes per token; the ids give the text back\n"
    assert run(monkeypatch, b"\x16") == 0  # a control byte that this vocabulary does not have
    assert "cannot spell all of the text" in capsys.readouterr().err
    assert run(monkeypatch, b"") == 0
    assert capsys.readouterr().err == "0 tokens, 0 bytes; the ids give the text back\n"


@pytest.mark.parametrize("ids", [b"49152", b"-1", b"1.5", b"x", b"9" * 30, b"\xff"])
def test_bad_ids(monkeypatch: pytest.MonkeyPatch, ids: bytes) -> None:
    with pytest.raises(ConfigError, match="is not a token id from 0 to 49151"):
        run(monkeypatch, b"1, 2 " + ids, "--decode")


def test_text_that_is_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="standard input is not UTF-8 at byte 2"):
        run(monkeypatch, b"ab\xff")
