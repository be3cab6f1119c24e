"""`forerun certify` as a command: its table, its file, its exit codes, its errors at the door."""

import json

import pytest

PAIR = ("certify", "llama", "--draft", "./draft")


def test_a_certificate(ok, tmp_path):
    file = tmp_path / "certificate.json"
    parts = [argument for part in ("texts", "cells", "streams") for argument in ("--part", part)]
    printed = ok(*PAIR, *parts, "--minutes", "0.001", "--json", str(file))
    assert max(map(len, printed.splitlines())) <= 80
    assert "PASSED: 7 of 7 checks" in " ".join(printed.split())
    assert "It does not prove:" in printed
    record = json.loads(file.read_text())
    assert record["passed"]
    checks = {check["name"]: check for check in record["checks"]}
    assert checks["u is uniform"]["tests"][0]["num_free"] == 63
    assert all({"method", "proves", "num_samples", "passed"} <= check.keys() for check in checks.values())


def test_a_wrong_version_has_exit_code_1(cli):
    printed = cli(*PAIR, "--minutes", "0.001", "--mutant", "m3", "--part", "toys", code=1).stdout
    assert "The wrong version m3 is switched in: a token is accepted only where p >= q." in printed
    assert "FAILED: llama with ./draft is not lossless here: every outcome" in " ".join(printed.split())
    assert "Left out: texts, cells, streams." in " ".join(printed.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("certify", "./nowhere"), "there is no folder nowhere"),
        ((*PAIR, "--minutes", "0"), "--minutes 0 is not possible: it must be above 0"),
        ((*PAIR, "--json", "no/folder/file.json"), "cannot be written: name a file in a folder"),
        ((*PAIR, "--part", "text"), "there is no part 'text' (did you mean 'texts'?)"),
        ((*PAIR, "--mutant", "m99"), "there is no mutant 'm99'"),
        ((*PAIR, "--draft", "lokup"), "did you mean 'lookup'?"),
        (("certify", "llama", "--draft", "none"), "there is nothing to certify"),
    ],
)
def test_at_the_door(refused, arguments, message):
    assert message in refused(*arguments)
