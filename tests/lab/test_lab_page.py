"""The page in a real browser: every widget is operated, and its numbers are those of forerun.theory.

`pages` (conftest.py) asserts behind each test that nothing was loaded from elsewhere and no console had an error.
"""

import json
import re
from typing import Any

import numpy as np
import pytest

from forerun import verify
from forerun.theory import formulas, joint, noise, roofline, simulate
from forerun.theory.landscape import landscape
from forerun.theory.published import TABLE_4
from lab.conftest import KEY, Pages, until
from serve.running import Running

BEARER = {"authorization": f"Bearer {KEY}".encode()}
ALPHAS = [0.0, 0.1, 0.35, 0.5, 0.7, 0.83, 0.99, 1.0]
PAIRS = [
    ([0.3, 0.2, 0.15, 0.12, 0.09, 0.07, 0.04, 0.03], [0.14, 0.28, 0.1, 0.2, 0.06, 0.12, 0.06, 0.04]),
    ([0.125] * 8, [0.5, 0.5, 0, 0, 0, 0, 0, 0]),
    ([0.6, 0.4, 0, 0, 0, 0, 0, 0], [0, 0, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1]),
]
TOLERANCE = 0.001  # of numbers with three digits


def number(page: Any, section: str, name: str) -> float:
    """A readout as a number."""
    text = page.locator(f"#{section} [data-readout={name}]").inner_text()
    return float(re.sub(r"[×,]", "", text).split()[0].replace("−", "-"))


def button(page: Any, section: str, name: str) -> Any:
    return page.locator(f"#{section}").get_by_role("button", name=name, exact=True)


def slide(page: Any, section: str, label: str, value: float) -> None:
    page.locator(f"#{section}").get_by_label(label, exact=True).fill(str(value))


def settle(page: Any) -> None:
    """Wait for the next frames: what moves with the hand is drawn once per frame."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


# -------------------------------------------------------------------------------------------------- the page's formulas


def test_the_formulas_of_the_page_are_those_of_theory(pages: Pages) -> None:
    """Every function of lib/formulas.js on a grid."""
    page = pages.open()
    gammas, costs = [0, 1, 2, 5, 16], [0.0, 0.05, 0.3, 1.0]
    curve = [1.0, 1.0, 1.05, 1.2, 1.3, 1.6, 2.1]
    found = page.evaluate(
        """async ([alphas, gammas, costs, curve, pairs]) => {
            const of = await import("./lib/formulas.js");
            return {
                tokens: alphas.map((a) => gammas.map((g) => of.expectedTokens(a, g))),
                speedup: alphas.map((a) => gammas.map((g) => costs.map((c) => of.speedup(a, g, c, 1.3)))),
                best: alphas.map((a) => costs.map((c) => of.optimalGamma(a, c, curve))),
                even: gammas.map((g) => costs.map((c) => of.breakEvenAlpha(g, c, 1.1))),
                alpha: pairs.map(([p, q]) => of.acceptance(p, q)),
                residual: pairs.map(([p, q]) => of.residual(p, q)),
                noise: pairs.map(([p]) => of.l1Noise(p, 5000)),
                chi: of.chiSquare([30, 25, 45, 0], [0.4, 0.3, 0.3, 0]),
                distance: of.l1Distance([1, 3], [0.5, 0.5]),
            };
        }""",
        [ALPHAS, gammas, costs, curve, PAIRS],
    )
    assert np.allclose(found["tokens"], [[formulas.expected_tokens(a, g) for g in gammas] for a in ALPHAS])
    wanted = [[[formulas.speedup(a, g, c, 1.3) for c in costs] for g in gammas] for a in ALPHAS]
    assert np.allclose(found["speedup"], wanted)
    best = [landscape(ALPHAS, len(curve) - 1, c, curve).best_gammas for c in costs]
    assert np.array_equal(found["best"], np.transpose(best))
    even = [[formulas.break_even_alpha(g, c, 1.1) for c in costs] for g in gammas]
    for one, other in zip(np.ravel(found["even"]), np.ravel(even), strict=True):
        assert one == pytest.approx(other, abs=1e-6) if other is not None else one is None
    assert np.allclose(found["alpha"], [formulas.acceptance(p, q) for p, q in PAIRS])
    assert np.allclose(found["residual"], [np.maximum(0, np.subtract(p, q)) for p, q in PAIRS])
    for one, (p, _) in zip(found["noise"], PAIRS, strict=True):
        assert one["mean"] == pytest.approx(simulate.l1_noise(p, 5000))
        assert one["deviation"] == pytest.approx(noise.l1_noise_deviation(p, 5000))
    assert found["chi"] == pytest.approx(noise.chi_square([30, 25, 45, 0], [0.4, 0.3, 0.3, 0]))
    assert found["distance"] == 0.5


# ------------------------------------------------------------------------------------------------------------ residual


def bars(page: Any, which: str) -> list[float]:
    """The probabilities that the handles of the bars say, to three digits."""
    handles = page.locator(f"#residual [role=slider][aria-label^='{which} of ']")
    return [float(value) for value in handles.evaluate_all("(all) => all.map((one) => one.ariaValueNow)")]


def test_residual(pages: Pages) -> None:
    page = pages.open()
    before = bars(page, "draft")
    handle = page.get_by_label("draft of mat")
    handle.focus()
    handle.press("PageUp")
    handle.press("ArrowUp")
    after = bars(page, "draft")
    assert after[0] == pytest.approx(before[0] + 0.06, abs=TOLERANCE)
    assert sum(after) == pytest.approx(1, abs=0.004)

    grip = page.get_by_label("target of sill").locator(".grip").bounding_box()
    page.mouse.move(grip["x"] + grip["width"] / 2, grip["y"] + grip["height"] / 2)
    page.mouse.down()
    page.mouse.move(grip["x"] + grip["width"] / 2, grip["y"] - 60, steps=4)
    page.mouse.up()
    target, draft = bars(page, "target"), bars(page, "draft")
    assert target[7] > 0.08
    alpha = formulas.acceptance(target, draft)
    assert number(page, "residual", "alpha") == pytest.approx(alpha, abs=0.004)
    assert number(page, "residual", "z") == pytest.approx(1 - alpha, abs=0.004)

    button(page, "residual", "Step").click()
    assert number(page, "residual", "samples") == 1
    assert re.search("Accepted|Rejected", page.locator("#residual .story").inner_text())
    button(page, "residual", "Run 1000").click()
    assert number(page, "residual", "samples") == 1001
    assert number(page, "residual", "rate") == pytest.approx(alpha, abs=5 * np.sqrt(alpha * (1 - alpha) / 1001) + 0.004)
    said = page.locator("#residual .strip").inner_text()
    mean = simulate.l1_noise(target, 1001)
    assert float(re.search(r"mean (\d\.\d+)", said)[1]) == pytest.approx(mean, abs=0.002)  # type: ignore[index]
    distance = float(re.search(r"target (\d\.\d+)", said)[1])  # type: ignore[index]
    assert distance < mean + 6 * noise.l1_noise_deviation(target, 1001)

    page.locator("#residual summary").click()
    until(page, "document.querySelectorAll('#residual tbody tr').length === 9")
    rows = page.locator("#residual tbody tr").evaluate_all(
        "(rows) => rows.map((row) => [...row.querySelectorAll('td')].map((cell) => Number(cell.innerText)))"
    )
    table, sums = np.array(rows[:-1]), rows[-1]
    p, q, kept, lost, back, emitted = table.T
    assert np.allclose(kept, np.minimum(p, q), atol=TOLERANCE)
    assert np.allclose(kept + lost, q, atol=2 * TOLERANCE)
    assert np.allclose(kept + back, p, atol=2 * TOLERANCE)
    assert np.allclose(emitted, p, atol=TOLERANCE)
    assert sums[3] == pytest.approx(sums[4])
    button(page, "residual", "Reset").click()
    assert number(page, "residual", "samples") == 0


# ----------------------------------------------------------------------------------------------------------- landscape


def check_landscape(page: Any, alpha: float, k: int, c: float, curve: list[float]) -> None:
    """All four readouts against theory, for checks that cost `curve`[K]."""
    settle(page)
    wanted = landscape([alpha], len(curve) - 1, c, curve)
    assert number(page, "landscape", "tokens") == pytest.approx(wanted.tokens[0, k], abs=1e-4)
    assert number(page, "landscape", "cost") == pytest.approx(wanted.costs[k], abs=TOLERANCE)
    assert number(page, "landscape", "speedup") == pytest.approx(wanted.speedups[0, k], abs=2e-4)
    best = page.locator("#landscape [data-readout=best]").inner_text()
    assert best == (str(wanted.best_gammas[0]) if wanted.best_gammas[0] else "none pays")


FREE = [1.0] * 17


def test_landscape(pages: Pages) -> None:
    page = pages.open()
    check_landscape(page, 0.7, 5, 0.2, FREE)
    assert "2.9412" in page.locator("#landscape [data-readout=tokens]").inner_text()
    assert "1.4706" in page.locator("#landscape [data-readout=speedup]").inner_text()
    example = page.locator("#landscape .findings tbody td").all_inner_texts()
    wanted = [formulas.expected_tokens(0.7, 5), formulas.double_counted_tokens(0.7, 5)]
    assert example == [*(f"{one:.4f}" for one in wanted), *(f"{one / 2:.4f}×" for one in wanted)]
    assert example[:3] == ["2.9412", "3.7731", "1.4706×"]

    slide(page, "landscape", "acceptance α", 0.83)
    slide(page, "landscape", "drafted tokens K", 9)
    slide(page, "landscape", "cost of a draft token c", 0.07)
    check_landscape(page, 0.83, 9, 0.07, FREE)

    marker = page.get_by_label("Marker on the map")
    marker.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft", "ArrowLeft", "ArrowLeft"):
        marker.press(key)
    check_landscape(page, 0.80, 7, 0.07, FREE)

    place = page.locator("#landscape .map canvas").bounding_box()
    page.mouse.move(place["x"] + 150, place["y"] + 150)
    page.mouse.down()
    page.mouse.move(place["x"] + 250, place["y"] + 120, steps=5)
    page.mouse.up()
    settle(page)
    dragged = re.fullmatch(r"alpha (\S+), K (\d+): .*", marker.get_attribute("aria-valuetext"))
    assert 0.3 < float(dragged[1]) < 0.6
    assert int(dragged[2]) > 9
    value = formulas.speedup(float(dragged[1]), int(dragged[2]), 0.07)
    assert number(page, "landscape", "speedup") == pytest.approx(value, rel=0.02)  # alpha is said with two digits


def test_things_to_find_and_where_it_does_not_pay(pages: Pages) -> None:
    page = pages.open()
    regimes = page.locator("#landscape .regimes li")
    button(page, "landscape", "α below c").click()
    check_landscape(page, 0.3, 3, 0.4, FREE)
    assert "here" in regimes.nth(0).get_attribute("class")
    assert "No K pays here" in page.locator("#landscape .verdict").first.inner_text()
    assert "The draft is too slow" in regimes.nth(0).inner_text()
    button(page, "landscape", "A real pair").click()
    check_landscape(page, 0.78, 3, 0.27, FREE)
    with_costs = formulas.speedup(0.78, 3, 0.27, 1.13)
    assert f"makes it {with_costs:.2f}×" in page.locator("#landscape .findings").inner_text()
    button(page, "landscape", "K beyond the ridge").click()
    check_landscape(page, 0.7, 14, 0.2, FREE)
    assert "here" in regimes.nth(1).get_attribute("class")
    assert f"from α = {formulas.break_even_alpha(14, 0.2):.2f}" in regimes.nth(1).inner_text()
    button(page, "landscape", "α → 1").click()
    check_landscape(page, 1.0, 8, 0.1, FREE)
    titles = page.locator("#landscape .regimes h4").all_inner_texts()
    assert titles == ["The draft is fast enough", "Enough is accepted", "The pass has room"]

    page.locator("#landscape").get_by_label("Published points").select_option("4")
    check_landscape(page, TABLE_4[4].alpha, TABLE_4[4].gamma, TABLE_4[4].c, FREE)
    assert f"Published: {TABLE_4[4].measured}×" in page.locator("#landscape").inner_text()


def test_the_roofline_moves_with_the_batch(pages: Pages) -> None:
    page = pages.open()
    button(page, "landscape", "A batch that computes already").click()
    until(page, "document.querySelector('#landscape .regimes').innerText.includes('256 requests')")
    shapes = roofline.SHAPES
    machine = next(iter(roofline.MACHINES.values()))
    for batch in (256, 2):
        slide(page, "landscape", "requests in a batch", int(np.log2(batch)))
        step = roofline.Step(batch=batch, context=1000)
        c = roofline.cost_ratio(shapes["llama-3.2-1b"], shapes["llama-3.1-8b"], step, machine)
        curve = roofline.verify_ratios(shapes["llama-3.1-8b"], step, machine, 16).tolist()
        settle(page)
        shown = float(page.get_by_label("cost of a draft token c").input_value())
        assert shown == pytest.approx(c, abs=0.006)
        tokens = formulas.expected_tokens(0.7, 5)
        assert number(page, "landscape", "cost") == pytest.approx(5 * c + curve[5], abs=0.002)
        assert number(page, "landscape", "speedup") == pytest.approx(tokens / (5 * c + curve[5]), abs=0.002)
        is_busy = page.locator("#landscape .regimes li").nth(2).evaluate("(item) => item.classList.contains('here')")
        assert is_busy == (curve[5] > 1.25)


def test_the_roofline_of_a_mixture_moves_with_the_overlap_of_its_experts(pages: Pages) -> None:
    """Its knob is there where a model has experts, and nowhere else."""
    page = pages.open("#landscape.check=roofline&landscape.k=5")
    knob = page.locator("#landscape").get_by_label("overlap of experts", exact=True)
    assert not knob.is_visible()
    page.locator("#landscape").get_by_label("target", exact=True).select_option("qwen3-30b-a3b")
    knob.wait_for(state="visible")
    target = roofline.SHAPES["qwen3-30b-a3b"]
    machine = next(iter(roofline.MACHINES.values()))
    costs = []
    for at, overlap in ((0, 0.0), (2, 0.5), (4, 1.0)):
        slide(page, "landscape", "overlap of experts", at)
        step = roofline.Step(context=1000, overlap=overlap)
        c = roofline.cost_ratio(roofline.SHAPES["llama-3.2-1b"], target, step, machine)
        curve = roofline.verify_ratios(target, step, machine, 16).tolist()
        settle(page)
        costs.append(number(page, "landscape", "cost"))
        assert costs[-1] == pytest.approx(5 * c + curve[5], abs=0.002)
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > 1.5 * costs[-1]


def passes_of(server: Running) -> Any:
    """The curve of passes that the server knows now."""
    return server.http.get("/lab/api/machine", headers=BEARER).json()["passes"]


def test_a_point_is_measured_here(pages: Pages, server: Running) -> None:
    """The engine generates, and the formula takes its measured curve."""
    curves = [passes_of(server)]  # on a busy machine they are measured anew, and the page has those of its beginning
    page = pages.open("#landscape.k=3")
    curves.append(passes_of(server))
    button(page, "landscape", "Measure it here").click()
    until(page, "document.querySelector('#landscape').innerText.includes('Measured with the drafter')")
    settle(page)
    said = page.locator("#landscape .note", has_text="Measured with").inner_text()
    alpha, c = (float(page.get_by_label(name).input_value()) for name in ("acceptance α", "cost of a draft token c"))
    assert float(re.search(r"α̂ = (\d\.\d+)", said)[1]) == pytest.approx(alpha, abs=0.011)  # type: ignore[index]
    curves.append(passes_of(server))
    promised = float(re.search(r"says (\d+\.\d+)×", said)[1])  # type: ignore[index]
    gains = [formulas.speedup(alpha, 3, c, float(np.interp(4, own["rows"], own["ratios"]))) for own in curves]
    assert any(promised == pytest.approx(gain, rel=0.05) for gain in gains)  # the slider rounds alpha and c
    assert "Both texts are the same" in said


# -------------------------------------------------------------------------------------------------------- unbiasedness


def run_rounds(page: Any, num: int) -> None:
    page.locator("#unbiasedness button.primary").click()
    until(page, f"document.querySelector('#unbiasedness [data-readout=rounds]').innerText === '{num:,}'")
    until(page, "!document.querySelector('#unbiasedness button.primary').disabled")


def test_unbiasedness_of_a_right_rule(pages: Pages) -> None:
    page = pages.open("#unbiased.seed=7&unbiased.size=3")
    choices = page.get_by_label("Verification rule").locator("option").evaluate_all("(all) => all.map((o) => o.value)")
    assert sorted(choices) == list(verify.rules())
    page.get_by_label("Verification rule").select_option("block")
    until(page, "document.querySelector('#unbiasedness [data-readout=theory]').innerText !== '–'")
    run_rounds(page, 5000)
    target, draft = bars(page, "target"), bars(page, "draft")
    wanted = joint.block_tokens(target, draft, 3) - 1
    assert number(page, "unbiasedness", "theory") == pytest.approx(wanted, abs=0.01)
    assert number(page, "unbiasedness", "accepted") == pytest.approx(wanted, abs=0.09)  # 5 standard errors
    assert number(page, "unbiasedness", "tail") > 1e-4
    assert page.locator("#unbiasedness [data-readout=exact]").inner_text() == "0"
    assert "Within the noise" in page.locator("#unbiasedness .verdict").inner_text()
    said = page.locator("#unbiasedness .strip").inner_text()
    assert float(re.search(r"mean (\d\.\d+)", said)[1]) == pytest.approx(0.028, abs=0.001)  # type: ignore[index]
    first = number(page, "unbiasedness", "tail")
    page.get_by_label("All tokens").check()
    until(page, "document.querySelector('#unbiasedness [data-readout=tail]').innerText !== '–'")
    tail = number(page, "unbiasedness", "tail")
    assert tail == pytest.approx(noise.chi_square_tail(number(page, "unbiasedness", "chi"), 7), abs=0.005) != first


def test_unbiasedness_of_a_wrong_rule(pages: Pages) -> None:
    """It is caught; one that does no harm on this pair is shown on another."""
    page = pages.open("#unbiased.seed=7&unbiased.size=2")
    page.get_by_label("Use a wrong rule").check()
    wrong = page.get_by_label("What is wrong with it")
    wrong.select_option("m15 draws dropped that the target excludes")
    until(page, "document.querySelector('#unbiasedness .verdict').innerText.includes('Forbidden word')")
    wrong.select_option("m1 correction drawn from p")
    until(page, "Number(document.querySelector('#unbiasedness [data-readout=exact]').innerText) > 0.001")
    run_rounds(page, 5000)
    assert "Caught" in page.locator("#unbiasedness .verdict").inner_text()
    assert "above the noise" in page.locator("#unbiasedness .strip").inner_text()
    page.get_by_label("Use a wrong rule").uncheck()
    assert number(page, "unbiasedness", "rounds") == 0


# ---------------------------------------------------------------------------------------------------- the page as such


def test_the_page_is_open_and_what_it_asks_for_wants_the_key(server: Running) -> None:
    for path in ("/lab", "/lab/", "/lab/main.js", "/lab/lib/api.js"):
        assert server.http.get(path, follow_redirects=True).status_code == 200, path
    for path in ("/lab/api/machine", "/lab/api/rules", "/lab/../lab/api/rules", "/v1/models", "/laboratory"):
        assert server.http.get(path).status_code == 401, path
        assert server.http.get(path, headers=BEARER).status_code in (200, 404), path
    assert "default-src 'self'" in server.http.get("/lab/").headers["content-security-policy"]
    assert server.http.get("/lab/static/../../app.py").status_code in (401, 404)


def test_a_link_carries_the_settings(pages: Pages) -> None:
    page = pages.open("#landscape.alpha=0.91&landscape.k=12&landscape.c=0.03&pair.draft=1_1_1_1_1_1_1_1")
    check_landscape(page, 0.91, 12, 0.03, FREE)
    assert bars(page, "draft") == [0.125] * 8
    slide(page, "landscape", "drafted tokens K", 4)
    until(page, "location.hash.includes('landscape.k=4')")
    again = pages.open(page.evaluate("location.hash"))
    check_landscape(again, 0.91, 4, 0.03, FREE)
    with again.expect_navigation(wait_until="load"):  # changed by hand in an open page
        again.evaluate("setTimeout(() => { location.hash = '#landscape.alpha=0.5&landscape.k=2&landscape.c=0.1'; })")
    again.wait_for_url("**/lab/#*alpha=0.5*")
    again.wait_for_selector("html[data-ready]")
    until(again, "document.querySelector('#landscape [data-readout=tokens]').innerText === '1.7500'")
    check_landscape(again, 0.5, 2, 0.1, FREE)


def test_a_link_of_nonsense_is_the_usual_page(pages: Pages) -> None:
    page = pages.open("#landscape.alpha=much&landscape.k=-3&pair.draft=1_2&unbiased.rule=none&unbiased.shape=9&x")
    check_landscape(page, 0.7, 1, 0.2, FREE)
    assert sum(bars(page, "draft")) == pytest.approx(1, abs=0.004)


@pytest.mark.parametrize(("width", "height", "theme"), [(1280, 800, "light"), (390, 844, "dark")])
def test_it_is_accessible_and_fits(pages: Pages, width: int, height: int, theme: str) -> None:
    """axe finds nothing, nothing is wider than the page, and the theme is the system's."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = pages.open(width=width, height=height, theme=theme)
    page.locator("#residual summary").click()
    button(page, "landscape", "A batch that computes already").click()
    page.wait_for_load_state("networkidle")  # what arrives above the next control would move it from under the click
    page.get_by_label("Use a wrong rule").check()
    until(page, "document.querySelector('#unbiasedness [data-readout=exact]').innerText !== '–'")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 384) == (theme == "dark")
    found = axe.run(page).response["violations"]
    assert not found, json.dumps([(one["id"], [node["html"] for node in one["nodes"]]) for one in found], indent=1)


def test_the_theme_can_be_changed(pages: Pages) -> None:
    page = pages.open()
    page.get_by_label("Change to the dark theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.get_by_label("Change to the light theme").is_visible()


def test_the_keyboard_reaches_every_control(pages: Pages) -> None:
    """What can be pressed, moved or chosen is in the order of the Tab key, unless it is hidden."""
    page = pages.open()
    num = page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, summary, [role=slider]")]
            .filter((one) => one.checkVisibility() && !one.disabled && one.tabIndex < 0).length"""
    )
    assert num == 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
