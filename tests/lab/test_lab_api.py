"""The JSON that the page asks for: formulas by name, and rounds of the real rules. No browser, no model."""

import inspect
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from forerun import verify
from forerun.errors import BadOption
from forerun.lab import theory_api, unbiased
from forerun.lab.app import add_error_answers
from forerun.lab.unbiased import MUTANTS, Rounds, Setting, counted, exact_tv, expected_accepted
from forerun.theory import formulas, roofline
from forerun.theory.noise import chi_square, chi_square_tail
from serve.running import assert_refused, wait_for

TARGET = [0.3, 0.2, 0.15, 0.12, 0.09, 0.07, 0.04, 0.03]
DRAFT = [0.14, 0.28, 0.1, 0.2, 0.06, 0.12, 0.06, 0.04]
FORBIDDEN = ([0.5, 0.25, 0.0, 0.1, 0.05, 0.05, 0.03, 0.02], [0.45, 0.15, 0.15, 0.1, 0.05, 0.05, 0.03, 0.02])
LEAST = 1e-6  # a p-value: by chance below it once in a million tests


@pytest.fixture(scope="module")
def client() -> TestClient:
    """The routes that need no engine."""
    app = FastAPI()
    add_error_answers(app)
    for part in (theory_api, unbiased):
        app.include_router(part.make_router(), prefix="/api")
    return TestClient(app)


def evaluate(client: TestClient, function: str, **arguments: Any) -> Any:
    answer = client.post("/api/theory", json={"calls": [{"function": function, "arguments": arguments}]})
    assert answer.status_code == 200, answer.text
    return answer.json()["results"][0]


# ----------------------------------------------------------------------------------------------------------- formulas


def test_a_path_that_is_none_has_the_form_of_all_errors(client: TestClient) -> None:
    for method, path, body, status, message, param in (
        ("GET", "/api/nothing", None, 404, "there is no /api/nothing", None),
        ("GET", "/api/theory", None, 405, "/api/theory takes POST", None),
        ("POST", "/api/theory", {}, 400, "calls: Field required", "calls"),
    ):
        answer = client.request(method, path, json=body)
        expected = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
        assert (answer.status_code, answer.json()) == (status, {"error": expected})


def test_numbers_are_broadcast(client: TestClient) -> None:
    found = evaluate(client, "speedup", alpha=[[0.6], [0.8], [1.0]], gamma=[1, 5], c=0.2)
    assert found == [[formulas.speedup(alpha, gamma, 0.2) for gamma in (1, 5)] for alpha in (0.6, 0.8, 1.0)]


def test_distributions_stay_whole(client: TestClient) -> None:
    assert evaluate(client, "acceptance", p=TARGET, q=DRAFT) == pytest.approx(formulas.acceptance(TARGET, DRAFT))
    found = evaluate(client, "kseq_acceptance", p=TARGET, q=DRAFT, num_draws=[1, 2, 3])
    assert found == pytest.approx([formulas.kseq_acceptance(TARGET, DRAFT, num) for num in (1, 2, 3)])


def test_what_is_no_finite_number_is_null(client: TestClient) -> None:
    assert evaluate(client, "oracle_speedup", alpha=[0.5, 1.0], c=0.0) == [2.0, None]
    assert evaluate(client, "break_even_alpha", gamma=5, c=0.1, verify_ratio=9.0) is None


LLAMAS = {"target": "llama-3.1-8b", "draft": "llama-3.2-1b", "machine": "h100"}


def test_the_roofline_takes_names(client: TestClient) -> None:
    given = {**LLAMAS, "context": 1000, "max_gamma": 3}
    found = evaluate(client, "roofline", **given, batch=[1, 512])
    step = roofline.Step(batch=512, context=1000)
    on = roofline.MACHINES["h100"]
    ratios = roofline.verify_ratios(roofline.SHAPES["llama-3.1-8b"], step, on, 3)
    assert found[1]["verify_ratios"] == pytest.approx(ratios)
    assert found[0]["verify_ratios"] == pytest.approx([1] * 4, rel=0.02)
    assert found[0]["free_rows"] == pytest.approx(roofline.ridge_rows(on))


def test_the_roofline_of_a_mixture_takes_an_overlap(client: TestClient) -> None:
    """Arrays of both are broadcast. A further row is free where all rows choose the same experts."""
    given = {**LLAMAS, "target": "qwen3-30b-a3b", "context": 0, "max_gamma": 3}
    found = evaluate(client, "roofline", **given, overlap=[[0], [0.5], [1]], batch=[1, 2])
    target = roofline.SHAPES["qwen3-30b-a3b"]
    for overlap, row in zip((0, 0.5, 1), found, strict=True):
        for batch, one in zip((1, 2), row, strict=True):
            step = roofline.Step(batch=batch, overlap=overlap)
            expected = roofline.verify_ratios(target, step, roofline.MACHINES["h100"], 3)
            assert one["verify_ratios"] == pytest.approx(expected)
            assert (one["free_rows"] > 1) == (overlap == 1)


def roofline_of(**arguments: Any) -> dict[str, Any]:
    return {"function": "roofline", "arguments": {**LLAMAS, "batch": 1, "context": 1, "max_gamma": 1, **arguments}}


REFUSED = {
    "unknown": ({"function": "os.system", "arguments": {}}, "must be one of acceptance, "),
    "no argument": ({"function": "speedup", "arguments": {"alpha": 0.5}}, "missing a required argument: 'gamma'"),
    "too many": ({"function": "expected_tokens", "arguments": {"alpha": [0.5] * 20_000, "gamma": 1}}, "at most 10,000"),
    "shapes": ({"function": "speedup", "arguments": {"alpha": [1, 1], "gamma": [1, 2, 3], "c": 0}}, "broadcast"),
    "range": ({"function": "expected_tokens", "arguments": {"alpha": 1.5, "gamma": 1}}, "alpha must be in [0, 1]"),
    "fraction": ({"function": "expected_tokens", "arguments": {"alpha": 0.5, "gamma": 1.5}}, "must be whole"),
    "far": ({"function": "optimal_gamma", "arguments": {"alpha": 1, "c": 0, "max_gamma": 10**9}}, "at most 256"),
    "text": ({"function": "expected_tokens", "arguments": {"alpha": "much", "gamma": 1}}, "must be a number"),
    "ragged": ({"function": "acceptance", "arguments": {"p": [[1], [1, 2]], "q": [1]}}, "must be a number"),
    "endless": ({"function": "expected_tokens", "arguments": {"alpha": 10**400, "gamma": 1}}, "must be a number"),
    "unlike": ({"function": "optimal_acceptance", "arguments": {"p": [1, 0], "q": [1], "num_draws": 1}}, "acceptance"),
    "chains": ({"function": "block_tokens", "arguments": {"p": [1], "q": [1], "gamma": 17}}, "at most 16"),
    "slow": (roofline_of(max_gamma=256, batch=[1] * 10_000, context=9), "more than 2 s"),
    "machine": (roofline_of(target="x", draft="x", machine="x"), "must be one of smollm2-135m"),
}


@pytest.mark.parametrize(("call", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_evaluated_is_refused(client: TestClient, call: dict[str, Any], said: str) -> None:
    assert_refused(client.post("/api/theory", json={"calls": [call]}), said)


def test_a_body_of_another_form_is_refused(client: TestClient) -> None:
    for body in ({}, {"calls": 3}, {"calls": [{"arguments": {}}]}):
        assert assert_refused(client.post("/api/theory", json=body), "")["message"]


def test_every_function_has_parameters_that_can_be_sent() -> None:
    kinds = {"float", "int", "str", "bool", "npt.ArrayLike", "Seq[float]"}
    for name, function in theory_api.FUNCTIONS.items():
        for parameter in inspect.signature(function).parameters.values():
            assert str(parameter.annotation) in kinds, (name, parameter)


# -------------------------------------------------------------------------------------------------------------- rules


def test_the_rules_are_found_by_scanning(client: TestClient) -> None:
    found = client.get("/api/rules").json()
    assert [rule["name"] for rule in found["rules"]] == list(verify.rules())
    assert {one["name"] for one in found["mutants"]} == set(MUTANTS)
    lenience = next(rule for rule in found["rules"] if rule["name"] == "lenience")
    assert not lenience["is_lossless"]
    assert lenience["options"][0]["name"] == "l"
    assert lenience["options"][0]["max"] == 1.0


SETTINGS = [
    *((rule, "chain", 3) for rule in verify.rules()),
    *((rule, shape, 2) for rule in ("ratio", "kseq", "traversal", "typical") for shape in ("independent", "distinct")),
]


def p_value(found: dict[str, Any], target: list[float]) -> float:
    """Of all emitted tokens."""
    counts = np.array(found["words"]).sum(axis=0).tolist()
    return chi_square_tail(chi_square(counts, target), sum(p > 0 for p in target) - 1)


@pytest.mark.parametrize(("rule", "shape", "size"), SETTINGS)
def test_rounds_are_what_theory_says(rule: str, shape: str, size: int) -> None:
    """Lossless rules emit the target's distribution, and every rule accepts as many tokens as theory expects."""
    if not verify.find(rule).judges("chain" if shape == "chain" else "tree", shape.replace("chain", "independent")):
        with pytest.raises(BadOption, match="cannot judge"):
            counted(Rounds(TARGET, DRAFT, rule, None, shape, size))
        return
    found = counted(Rounds(TARGET, DRAFT, rule, None, shape, size, num_rounds=800, seed=11))
    lengths = np.repeat(np.arange(len(found["accepted"])), found["accepted"])
    assert len(lengths) == 800 == sum(found["words"][0])
    wanted = expected_accepted(Setting(TARGET, DRAFT, rule, None, shape, size))
    assert wanted is not None
    assert lengths.mean() == pytest.approx(wanted, abs=5 * lengths.std() / np.sqrt(800) + 1e-9)
    assert (p_value(found, TARGET) > LEAST) == verify.find(rule).is_lossless
    exact = exact_tv(Setting(TARGET, DRAFT, rule, None, shape, size))
    assert (exact is None) == (rule == "match")
    assert exact is None or (exact < 1e-12) == verify.find(rule).is_lossless


def test_a_part_of_the_rounds_is_a_part_of_the_counts() -> None:
    """The page adds parts up: their coins depend on the number of the round alone."""
    whole = counted(Rounds(TARGET, DRAFT, num_rounds=40, seed=5))
    parts = [counted(Rounds(TARGET, DRAFT, first_round=i, num_rounds=20, seed=5)) for i in (0, 20)]
    for key in ("words", "accepted"):
        assert np.array_equal(np.array(whole[key]), sum(np.array(part[key]) for part in parts))


@pytest.mark.parametrize("name", MUTANTS)
def test_every_wrong_rule_is_caught_on_some_pair(name: str) -> None:
    """By enumeration; for `match`, which cannot be enumerated with so many words, by its rounds."""
    needs = MUTANTS[name].needs
    rule, shape = ("match", "chain") if needs == "match" else ("ratio", needs)
    if rule == "match":
        found = counted(Rounds(TARGET, DRAFT, rule, name, shape, 1, num_rounds=2500, seed=3))
        assert p_value(found, TARGET) < LEAST
        return
    errors = [exact_tv(Setting(*pair, rule, name, shape, 2)) for pair in ((TARGET, DRAFT), FORBIDDEN)]
    assert max(error for error in errors if error is not None) > 1e-3


def test_settings_that_are_impossible_are_refused(client: TestClient) -> None:
    good = {"target": TARGET, "draft": DRAFT}
    for change, said in (
        ({"rule": "nearly"}, "nearly"),
        ({"rule": "block", "shape": "independent", "size": 2}, "cannot judge"),
        ({"mutant": "m99"}, "must be one of"),
        ({"mutant": "m7 equal siblings merged"}, "needs independent"),
        ({"shape": "circle"}, "must be one of chain"),
        ({"target": [0.5, 0.5]}, "2 target and 8 draft"),
        ({"target": [0.0] * 8}, "no weights"),
        ({"size": 99}, "less than or equal to 8"),
        ({"num_rounds": 10**6}, "less than or equal to 1000"),
    ):
        assert_refused(client.post("/api/rounds", json={**good, **change}), said)


def test_few_wait_for_their_turn(client: TestClient) -> None:
    """Each that waits holds a thread, of which the server has some tens."""
    asked = {"target": TARGET, "draft": DRAFT, "num_rounds": 1}
    with ThreadPoolExecutor(unbiased.MOST_WAITING + 3) as pool:
        with unbiased._TURN:
            posts = [pool.submit(client.post, "/api/rounds", json=asked) for _ in range(unbiased.MOST_WAITING + 3)]
            wait_for(lambda: sum(post.done() for post in posts) == 2)
        codes = Counter(post.result().status_code for post in posts)
    assert codes == {200: unbiased.MOST_WAITING + 1, 503: 2}
    for _ in range(unbiased.MOST_WAITING + 2):
        assert client.post("/api/rounds", json=asked).status_code == 200, "a place was not given back"
