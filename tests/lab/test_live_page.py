"""Live and Trace in a real browser: a generation is watched to its end, and the page says what `LLM.generate` says.

The engine is in this process, so that a test can ask it; `pages` asserts that no console had an error.
"""

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest

from forerun import LLM, SamplingParams, verify
from forerun.engine.request import RequestOutput
from lab.conftest import Pages, until
from lab.serving import serving_lab
from lab.test_live import is_idle, listeners
from serve.running import wait_for

PROMPT = "class Stack:\n    def push(self, item):\n"
CHAIN = {"draft": "model", "k": 4, "temperature": 0, "tokens": 48}
TREE = {"draft": "tree", "k": 8, "temperature": 0.8, "tokens": 48, "seed": 11, "rule": "ratio"}


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Drafts have fixed lengths: `auto` chooses them by the clock, and the page's run and a test's would differ."""
    return LLM("shipped", extra_drafts="tree", max_batch_size=2, pacing="fixed")


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Any]:
    """The lab around that engine; `pages` are of it."""
    with serving_lab(llm) as url:
        yield SimpleNamespace(url=url.removesuffix("/lab/"))


def opened(pages: Pages, settings: dict[str, Any], **window: Any) -> Any:
    """The page with these settings of Live."""
    chosen = {"prompt": PROMPT, "race": 0, **settings}
    return pages.open("#" + urlencode({f"live.{name}": value for name, value in chosen.items()}), **window)


def part(page: Any, name: str) -> Any:
    return page.locator(f"[data-part={name}]")


def run(page: Any) -> None:
    """Press Run and wait for the end."""
    part(page, "run").click()
    until(page, "() => !document.querySelector('[data-part=run]').disabled")


def said(llm: LLM, settings: dict[str, Any], **more: Any) -> RequestOutput:
    """What `generate` says of the settings of a page."""
    names = {"draft": "draft", "k": "spec_length", "temperature": "temperature", "tokens": "max_tokens", "seed": "seed"}
    params = {names[name]: value for name, value in settings.items() if name in names}
    params = {**params, "acceptance": settings.get("rule"), "ignore_eos": True, **more}
    return llm.generate(PROMPT, SamplingParams(**params))[0]


def readout(page: Any, name: str) -> str:
    text: str = page.locator(f"#live [data-readout={name}]").inner_text()
    return text


@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_generation_is_watched_to_its_end(llm: LLM, pages: Pages, settings: dict[str, Any]) -> None:
    """The text, the colour of each token, every number of the report, a row per round, and a step per pass."""
    page, out = opened(pages, settings), said(llm, settings)
    run(page)
    assert part(page, "text").text_content() == out.text
    kinds = page.eval_on_selector_all("#live .tok", "all => all.map((one) => one.className.split(' ')[1])")
    assert set(kinds) == {f"is-{origin}" for origin in out.report.origins}
    report = out.report
    assert readout(page, "passes") == str(report.num_steps)
    assert readout(page, "accepted") == f"{report.num_accepted} / {report.num_drafted}"
    assert readout(page, "alpha") == f"{report.alpha_hat:.2f}"
    assert readout(page, "per-pass") == f"{report.mean_accepted_length:.2f}"
    positions = page.locator(".position span:last-child").all_inner_texts()
    pairs = zip(report.accepted_per_position, report.drafted_per_position, strict=True)
    assert positions == [f"{accepted} / {drafted}" for accepted, drafted in pairs]
    shares = page.locator("#live [role=option] .share").all_inner_texts()
    assert shares == [f"{accepted}/{drafted}" for drafted, accepted in report.rounds]
    part(page, "table").locator("summary").click()
    until(page, "() => document.querySelector('#trace tbody tr')")
    numbers = page.locator("#trace tbody th").all_inner_texts()
    num_prompt_steps = sum(number.endswith("(prompt)") for number in numbers)
    assert num_prompt_steps >= 1  # a busy machine reads even a short prompt in parts
    assert len(numbers) == report.num_steps + num_prompt_steps
    cells = [row.split("\t")[-3:] for row in page.locator("#trace tbody tr").all_inner_texts()[num_prompt_steps:]]
    assert [(int(drafted), int(accepted)) for drafted, accepted, _ in cells] == report.rounds
    assert sum(int(tokens) for *_, tokens in cells) == len(out.token_ids)
    assert f"{len(numbers)} steps and {len(out.token_ids)} tokens" in part(page, "summary").inner_text()


def number(text: str) -> float:
    """Read a number as the page writes it: 1,234.5."""
    return float(text.replace(",", ""))


def test_the_race(llm: LLM, pages: Pages) -> None:
    """Plain decoding behind it: both texts, the quotient of their speeds, and two rows in the trace."""
    page = opened(pages, {**CHAIN, "race": 1})
    with page.expect_response("**/api/live") as answer:
        run(page)
    plain = said(llm, CHAIN, draft="none", spec_length=None)
    for lane in ("draft", "plain"):
        assert page.locator(f"[data-lane={lane}]").text_content() == plain.text
    assert "Both texts are the same." in part(page, "race-says").inner_text()
    rates = [number(x) for x in re.findall(r"([\d.,]+) tokens per second", part(page, "status").inner_text())]
    quotient = number(readout(page, "speedup"))
    assert quotient == pytest.approx(number(readout(page, "rate")) / rates[-1], rel=0.05)
    told = re.findall(r"event: (\w+)\ndata: (.*)", answer.value.text())
    begun: dict[str, Any] = {}
    behind = []  # tokens per second of each lane behind its first round, whose tokens took the prompt's time, too
    for name, data in ((name, json.loads(data)) for name, data in told):
        if name == "round":
            begun.setdefault(data["lane"], (data["at_s"], len(data["tokens"])))
        if name == "end":
            at_s, num = begun[data["lane"]]
            behind.append((len(data["token_ids"]) - num) / (data["seconds"] - at_s))
    shown = re.search(r"prompt: ([\d.,]+) against ([\d.,]+) tokens", part(page, "race-says").inner_text())
    assert [number(one) for one in shown.groups()] == pytest.approx(behind, abs=0.06)
    assert part(page, "summary").locator("li").count() == 2
    assert page.locator("#trace .trace-stage canvas").bounding_box()["height"] > 120


def test_a_round_in_full(llm: LLM, pages: Pages) -> None:
    """By the keyboard and by pointing: its drafted tokens, probabilities, coins, verdict; a tree is drawn as one."""
    page, out = opened(pages, TREE), said(llm, TREE)
    run(page)
    rounds = part(page, "rounds")
    rounds.focus()
    rounds.locator("[role=option]").nth(5).hover()
    rounds.press("End")
    page.evaluate("scrollBy(0, 60)")  # another round comes under the mouse, which was not moved
    page.wait_for_timeout(300)  # until the browser says so
    assert part(page, "round").locator("h3").inner_text() == f"Round {out.report.num_steps}"
    rounds.press("Home")
    rounds.press("ArrowDown")
    assert page.locator("#live [aria-selected=true] .number").inner_text() == "2"
    drafted, accepted = out.report.rounds[1]
    assert part(page, "round").locator("tbody tr").count() == drafted == page.locator(".live-tree .node").count()
    assert part(page, "round").locator("tbody tr.is-accepted").count() == accepted
    coins = re.findall(r"(0\.\d+) ([<≥]) (0\.\d+)", part(page, "round").inner_text())
    assert all(
        (float(coin) <= float(chance)) if sign == "<" else (float(coin) >= float(chance))
        for coin, sign, chance in coins
    )
    token = page.locator("#live .tok", has_text=re.compile(r"\S")).last  # an end of a line has no place to point at
    number = token.get_attribute("data-round")
    token.hover()
    assert part(page, "round").locator("h3").inner_text() == f"Round {number}"
    trace = part(page, "trace")
    trace.focus()
    trace.press("End")
    steps = out.report.num_steps + 1
    assert trace.get_attribute("aria-valuenow") == trace.get_attribute("aria-valuemax") == str(steps)
    assert f"step {steps} of {steps}" in part(page, "step").inner_text()


def test_stop_ends_the_request(llm: LLM, pages: Pages) -> None:
    """The engine waits for the click, so that a slow page does not find the text written to its end."""
    page = opened(pages, {"draft": "none", "temperature": 1, "tokens": 512})
    steps, clicked = itertools.count(), threading.Event()

    def hold(_: object) -> None:
        if next(steps) > 8 and not clicked.wait(60):
            raise TimeoutError("Stop was not clicked")
        time.sleep(0.02 if clicked.is_set() else 0)  # 10 s for the word of the click to arrive

    end = llm.listen(hold)
    try:
        part(page, "run").click()
        until(page, "() => document.querySelectorAll('#live [role=option]').length > 2")
        part(page, "stop").click()
        clicked.set()
        until(page, "() => !document.querySelector('[data-part=run]').disabled")
        assert part(page, "status").inner_text() == "Stopped."
        wait_for(lambda: is_idle(llm))
    finally:
        clicked.set()
        end()
    wait_for(lambda: listeners(llm) == 0)
    assert next(steps) < 512


def test_what_cannot_be_honoured_is_said(pages: Pages) -> None:
    """By the page where it can see it, by the server where it cannot."""
    page = opened(pages, {"seed": "abc"})
    part(page, "run").click()
    assert "whole number" in part(page, "status").inner_text()
    page.locator("#live-seed").fill("99999999999999999999")
    pages.problems.clear()
    run(page)
    assert "seed=99999999999999999999" in part(page, "status").inner_text()
    assert [problem for problem in pages.problems if "400" not in problem] == []
    pages.problems.clear()  # the console's own note of the answer's status


def test_the_menu_and_what_a_rule_can_judge(llm: LLM, pages: Pages) -> None:
    page = opened(pages, {"draft": "tree", "rule": "block"})
    methods, rules = (
        page.locator("#live").get_by_label(name, exact=True) for name in ("Method that drafts", "Acceptance")
    )
    values = "all => all.map((one) => one.value)"
    assert methods.locator("option").evaluate_all(values) == list(llm.drafters)
    assert rules.locator("option").evaluate_all(values) == ["", *verify.rules()]
    assert rules.input_value() == "", "block judges no trees"
    judges = rules.locator("option:not(:disabled)").evaluate_all(values)[1:]
    tree = llm.drafters["tree"]
    assert judges == [rule for rule in verify.rules() if verify.find(rule).judges(tree.shape, tree.draws)]
    methods.select_option("model")
    assert rules.locator("option:disabled").count() == 0


def test_a_link_repeats_a_generation(llm: LLM, pages: Pages) -> None:
    """The settings of one page, opened as another: the same text."""
    page = opened(pages, {})
    page.locator("#live-prompt").fill(PROMPT)
    live = page.locator("#live")
    live.get_by_label("Method that drafts", exact=True).select_option("tree")
    live.get_by_label("Acceptance", exact=True).select_option("match")
    for label, value in (("Drafted tokens K", 3), ("Temperature", 1.2), ("Tokens at most", 32)):
        live.get_by_label(label, exact=True).fill(str(value))
    page.locator("#live-seed").fill("18446744073709551615")
    part(page, "share").click()
    other = pages.open("#" + page.evaluate("() => location.hash.slice(1)"))
    run(other)
    wanted = said(llm, {"draft": "tree", "k": 3, "temperature": 1.2, "tokens": 32, "rule": "match", "seed": 2**64 - 1})
    assert part(other, "text").text_content() == wanted.text
    assert str(2**64 - 1) in part(other, "status").inner_text()


@pytest.mark.parametrize(("width", "height", "theme"), [(1280, 800, "light"), (390, 844, "dark")])
def test_it_is_accessible_and_fits_in_use(pages: Pages, width: int, height: int, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = opened(pages, {**TREE, "race": 1}, width=width, height=height, theme=theme)
    run(page)
    if width < 760:  # what was asked for is a screen long there, and Run at its end
        top = part(page, "status").evaluate("(it) => it.getBoundingClientRect().top")
        assert 0 <= top < height / 2
    part(page, "table").locator("summary").click()
    until(page, "() => document.querySelector('#trace tbody tr')")
    found = axe.Axe().run(page, context="#live, #trace")
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
