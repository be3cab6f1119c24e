"""Photographs the lab, and times it: `python docs/development/measure/lab_pictures.py [folder]`.

Into the folder (runs/lab if none is named): the whole page and each widget in use, at 1280 x 800 and 390 x 844, light
and dark. The two pictures of docs/use/lab.md are made again. Printed are the time to the first paint, and the
time of the page's scripts per frame while the marker and the knob c of the landscape are dragged. It needs playwright,
and the system's Chromium.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[3]
SIZES = {"wide": (1280, 800), "phone": (390, 844)}
WIDGETS = ("residual", "landscape", "unbiasedness", "live", "trace")
# Picture of docs/use/lab.md -> the first and the last element that it shows.
IN_DOCS = {
    "lab-landscape.png": ("#landscape .card", "#landscape .card"),
    "lab-live.png": ("#live .live-results .card", "#live .live-results .card + .card"),
}
MARGIN = 12  # pixels around it
SETTINGS = "#live.temperature=0&landscape.k=3"
FRAMES = 240
# What is shown: Residual with rounds, Landscape with a measured point, a wrong rule that was caught, and a generation
# with a round of which a part was accepted.
IN_USE = """async () => {
    const press = (widget, text) =>
        [...document.querySelectorAll(`#${widget} button`)].find((one) => one.innerText === text)?.click();
    const until = async (holds) => { while (!holds()) await new Promise((done) => setTimeout(done, 50)); };
    document.querySelector(".page-head").style.position = "static";
    press("residual", "Run 1000");
    press("landscape", "Measure it here");
    await until(() => document.querySelector("#landscape").innerText.includes("Measured with the drafter"));
    document.querySelector("#unbiasedness input[role=switch]").click();
    await until(() => Number(document.querySelector("#unbiasedness [data-readout=exact]").innerText) > 0);
    press("unbiasedness", "Run 5000");
    await until(() => document.querySelector("#unbiasedness [data-readout=rounds]").innerText === "5,000");
    document.querySelector("#live [data-part=run]").click();
    await new Promise((done) => setTimeout(done, 200));
    await until(() => !document.querySelector("#live [data-part=run]").disabled);
    const counts = (row) => row.innerText.match(/(\\d+)\\/(\\d+)/).slice(1).map(Number);
    const rows = [...document.querySelectorAll("#live [role=option]")];
    const isMixed = (row) => counts(row)[0] > 0 && counts(row)[0] < counts(row)[1];
    (rows.find(isMixed) ?? rows[0]).click();
}"""
PAINT = """() => performance.getEntriesByName("first-contentful-paint")[0].startTime"""
# Moves what is dragged from frame to frame, and returns the milliseconds of scripts in each.
DRAG = """async ([what, frames]) => {
    const map = document.querySelector("#landscape .map canvas");
    const box = map.getBoundingClientRect();
    const knob = [...document.querySelectorAll("#landscape input[type=range]")][2];
    const { lab } = await import("./main.js");
    const times = [];
    const send = (type, share) => map.dispatchEvent(new PointerEvent(type, { pointerId: 1, button: 0, bubbles: true,
        clientX: box.left + 60 + share * (box.width - 180), clientY: box.top + 20 + share * (box.height - 80) }));
    map.setPointerCapture = () => {};
    map.hasPointerCapture = () => true;
    if (what === "marker") send("pointerdown", 0);
    for (let i = 0; i < frames; i += 1) {
        const share = 0.5 - 0.5 * Math.cos((i / frames) * 6 * Math.PI);
        const start = performance.now();
        if (what === "marker") send("pointermove", share);
        else { knob.value = share; knob.dispatchEvent(new Event("input", { bubbles: true })); }
        const handled = performance.now() - start;
        const before = lab.perf.landscape.length;
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        times.push(handled + lab.perf.landscape.slice(before).reduce((sum, one) => sum + one, 0));
    }
    return times;
}"""


@contextmanager
def lab() -> Iterator[str]:
    """The address of `forerun lab` with the model that it shows where none is named."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "forerun", "lab", *sys.argv[2:], "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.match(r"lab: (\S+)", line):
                yield found[1]
                return
            sys.stderr.write(line)
        raise SystemExit("the lab did not start")
    finally:
        process.terminate()
        process.wait()


def photographed(browser: Any, url: str, folder: Path) -> None:
    """Make all pictures of the page in use."""
    for size, (width, height) in SIZES.items():
        for theme in ("light", "dark"):
            page = opened(browser, url, width, height, theme)
            page.screenshot(path=folder / f"first-{size}-{theme}.png")
            page.evaluate(IN_USE)
            page.wait_for_timeout(300)
            page.screenshot(path=folder / f"page-{size}-{theme}.png", full_page=True)
            for widget in WIDGETS:
                page.locator(f"#{widget}").screenshot(path=folder / f"{widget}-{size}-{theme}.png")
            if (size, theme) == ("wide", "light"):
                for name, (first, last) in IN_DOCS.items():
                    page.screenshot(
                        path=ROOT / "docs" / "pictures" / name, full_page=True, clip=around(page, first, last)
                    )
            page.context.close()


def around(page: Any, first: str, last: str) -> dict[str, float]:
    """The rectangle of the whole page that holds both elements."""
    page.evaluate("scrollTo(0, 0)")
    top, bottom = (page.locator(one).first.bounding_box() for one in (first, last))
    return {
        "x": top["x"] - MARGIN,
        "y": top["y"] - MARGIN,
        "width": top["width"] + 2 * MARGIN,
        "height": bottom["y"] + bottom["height"] - top["y"] + 2 * MARGIN,
    }


def opened(browser: Any, url: str, width: int, height: int, theme: str) -> Any:
    """A page on which all widgets are there."""
    page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme).new_page()
    page.goto(url + SETTINGS)
    page.wait_for_selector("html[data-ready]")
    return page


def timed(browser: Any, url: str) -> None:
    """Print the times that the page takes."""
    page = opened(browser, url, *SIZES["wide"], "light")
    first = page.evaluate(PAINT)
    page.reload()
    page.wait_for_selector("html[data-ready]")
    print(f"first paint: {first:.0f} ms with a new browser, {page.evaluate(PAINT):.0f} ms when loaded again")
    for what in ("marker", "c"):
        times = sorted(page.evaluate(DRAG, [what, FRAMES]))
        print(
            f"dragging {what}: scripts take {times[len(times) // 2]:.2f} ms per frame (median), "
            f"{times[int(len(times) * 0.99)]:.2f} (99 %), {times[-1]:.2f} (most) in {FRAMES} frames"
        )
    page.context.close()


def main() -> None:
    """Time the page, then photograph it."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "runs" / "lab")
    folder.mkdir(parents=True, exist_ok=True)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("the lab is photographed in Chromium, which is not here: apt-get install chromium")
    with lab() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        timed(browser, url)
        photographed(browser, url, folder)
        browser.close()
    print(f"pictures are in {folder}")


if __name__ == "__main__":
    main()
