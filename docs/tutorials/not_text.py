"""Draws digits with a model of pixels, plainly and speculatively: `python docs/tutorials/not_text.py`.

An image of scikit-learn's digits (8x8 pixels, 17 levels of grey) is a row of 65 token ids: its class, then its pixels
line by line. Two llamas learn such rows, without a tokenizer: a target, and a draft model that learns from images that
the target drew itself. Then the promise is checked on images: with the same seeds speculative decoding draws the very
images of plain decoding, and under the rule `ratio` pixels have the target's distribution. not_text.md explains it.

It needs scikit-learn, and matplotlib for the picture, which is left out where that is not installed.
"""

import argparse
import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forerun import LLM, SamplingParams
from forerun.cli.main import app

SIDE, LEVELS, CLASSES = 8, 17, 10  # pixels in a line, values of a pixel, digits
NUM_PIXELS, NUM_IDS = SIDE * SIDE, LEVELS + CLASSES
BATCH = 32  # images that are drawn at once
TARGET = "--hidden-size 128 --layers 4 --heads 4 --kv-heads 2 --ffn-size 384 --lr 3e-3"
DRAFT = "--hidden-size 64 --layers 1 --heads 2 --kv-heads 1 --ffn-size 192 --lr 5e-3"
DATA = f"--vocab-size {NUM_IDS} --seq-len-tokens {NUM_PIXELS} --tokens-per-step 1024 --validation-windows 113"


def class_id(digit: int) -> int:
    """Return the id that begins an image of a digit; ids below LEVELS are pixels."""
    return LEVELS + digit


def digits() -> np.ndarray:
    """Return all images of scikit-learn as rows of ids, [1797, 65]."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return np.concatenate([class_id(found.target[:, None]), found.data], axis=1).astype(np.uint8)


def run(command: str) -> Any:
    """Show and run a command of forerun, in this process."""
    print(f"$ forerun {command}", flush=True)
    return app(shlex.split(command), standalone_mode=False)


# ----------------------------------------------------------------------------------------------------------- training


def train(out: Path, target_steps: int, draft_steps: int, num_own: int) -> None:
    """Write out/digits.npy, train the target on it, let it draw out/own.npy, and train the draft model on that."""
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "digits.npy", digits())
    run(f"train lm --out {out}/target --ids {out}/digits.npy {DATA} {TARGET} --max-steps {target_steps} --resume")
    own = draw(opened(out, "none"), num_own, seed=10**6)
    np.save(out / "own.npy", np.array([o.prompt_ids + o.token_ids for o in own], dtype=np.uint8))
    teacher = f"--teacher {out}/target/model --loss kl"
    run(f"train lm --out {out}/draft --ids {out}/own.npy {teacher} {DATA} {DRAFT} --max-steps {draft_steps} --resume")


def held_out_bits(out: Path) -> dict[str, float]:
    """Return the bits per pixel of held-out images for target and draft model, by the loss that training measures."""
    import torch

    from forerun.train.batches import load_rows, split_rows
    from forerun.train.losses import cross_entropy
    from forerun.train.model import load_decoder, run_windows
    from forerun.train.ops import TrainingOps

    _, rows = split_rows(load_rows(out / "digits.npy", NUM_IDS, NUM_PIXELS))
    windows = torch.from_numpy(rows)
    found = {}
    for name in ("target", "draft"):
        model = load_decoder(out / name / "model", TrainingOps(NUM_PIXELS))
        with torch.no_grad():
            logits = model.logits(run_windows(model, windows[:, :-1]))
        found[name] = float(cross_entropy(logits, windows[:, 1:].reshape(-1))) / math.log(2)
    return found


# ------------------------------------------------------------------------------------------------------------ drawing


def opened(out: Path, draft: str, target: str = "target", **options: Any) -> LLM:
    """Return an engine; draft: "none", or the folder of the draft model in `out`."""
    draft = draft if draft == "none" else str(out / draft / "model")
    return LLM(out / target / "model", draft=draft, max_batch_size=BATCH, **options)


def draw(llm: LLM, num: int, seed: int = 0, acceptance: str | None = None) -> list[Any]:
    """Return outputs of `num` images at temperature 1: all classes in turn, with seeds from `seed` on."""
    prompts = [[class_id(i % CLASSES)] for i in range(num)]
    params = [SamplingParams(max_tokens=NUM_PIXELS, seed=seed + i, acceptance=acceptance) for i in range(num)]
    return llm.generate(prompts, params)


def speculation(outputs: Sequence[Any]) -> dict[str, float]:
    """Return alpha-hat and tokens per pass, over all outputs."""
    reports = [output.report for output in outputs]
    tested, accepted = (sum(getattr(r, name) for r in reports) for name in ("num_tested", "num_accepted"))
    emitted, steps = (sum(getattr(r, name) for r in reports) for name in ("num_emitted", "num_steps"))
    return {"alpha_hat": accepted / max(tested, 1), "tokens_per_pass": emitted / steps}


# ----------------------------------------------------------------------------------------------------------- checking


def beginnings(llm: LLM, given: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Return what the target gives the next three pixels behind the ids `given`, by their values.

    It runs every possible beginning; values of less than one in ten million are left out.
    """
    found: dict[tuple[int, ...], float] = {(): 1.0}
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
    for _ in range(3):
        outputs = llm.generate([[*given, *begun] for begun in found], params)
        found = {
            (*begun, token): prob * math.exp(logprob)
            for (begun, prob), output in zip(found.items(), outputs, strict=True)
            for token, logprob in output.logprobs[0].top
            if prob * math.exp(logprob) > 1e-7
        }
    return found


def chi_square(probs: Mapping[tuple[int, ...], float], drawn: Counter[tuple[int, ...]]) -> tuple[float, int, float]:
    """Return Pearson's statistic, its degrees of freedom, and the chance of a larger one if `probs` are true.

    Values that are expected less than five times are one bin, as is whatever `probs` has not.
    """
    from scipy.stats import chi2

    num = drawn.total()
    bins = [(drawn[value], prob * num) for value, prob in probs.items() if prob * num >= 5]
    bins.append((num - sum(got for got, _ in bins), num - sum(wanted for _, wanted in bins)))
    statistic = sum((got - wanted) ** 2 / wanted for got, wanted in bins)
    return statistic, len(bins) - 1, float(chi2.sf(statistic, len(bins) - 1))


def check(out: Path, num_images: int, num_beginnings: int, spec_length: int) -> dict[str, Any]:
    """Compare images of plain and of speculative decoding, and pixels of `ratio` with what the target says of them."""
    plain, fast = opened(out, "none"), opened(out, "draft", spec_length=spec_length)
    pairs = zip(draw(plain, num_images), draw(fast, num_images), strict=True)
    num_equal = sum(a.token_ids == b.token_ids for a, b in pairs)
    image = digits()[0]
    given = image[: 1 + 2 * SIDE + 2].tolist()  # two lines and two pixels of an image: what follows is uncertain
    params = [SamplingParams(max_tokens=6, seed=i, acceptance="ratio") for i in range(num_beginnings)]
    outputs = fast.generate([given] * num_beginnings, params)
    drawn = Counter(tuple(output.token_ids[:3]) for output in outputs)
    statistic, freedom, chance = chi_square(beginnings(plain, given), drawn)
    alpha = speculation(outputs)["alpha_hat"]
    return {"num_images": num_images, "num_equal": num_equal, "num_beginnings": num_beginnings, "alpha_hat": alpha} | {
        "chi_square": statistic,
        "degrees_of_freedom": freedom,
        "p_value": chance,
    }


# ------------------------------------------------------------------------------------------------------------ picture


def picture(out: Path, file: Path, spec_length: int, lines: int) -> None:
    """Draw images of plain decoding, of speculative decoding with its drafted pixels, and of the draft model alone."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {file}, which needs matplotlib: pip install matplotlib")
        return
    num = lines * CLASSES
    plain = draw(opened(out, "none"), num)
    fast = draw(opened(out, "draft", spec_length=spec_length), num)
    alone = draw(opened(out, "none", target="draft"), num)
    is_same = [o.token_ids for o in plain] == [o.token_ids for o in fast]
    numbers = speculation(fast)
    panels = [
        ("the target", plain, False),
        (f"speculative decoding: {'the same images' if is_same else 'OTHER IMAGES'}", fast, False),
        (f"orange: guessed by the draft model ({numbers['tokens_per_pass']:.1f} pixels per pass)", fast, True),
        ("the draft model alone", alone, False),
    ]
    figure = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, outputs, is_marked) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        axes.imshow(grid(outputs, lines, is_marked), interpolation="nearest")
        axes.set_title(title, fontsize=11)
        axes.axis("off")
    figure.savefig(file, dpi=70)
    print(f"{file}: {'the same images' if is_same else 'not the same images'} with and without speculation")


def grid(outputs: Sequence[Any], lines: int, is_marked: bool) -> np.ndarray:
    """Return images as one, [height, width, RGB] in 0 .. 1, a gap of one pixel between them.

    is_marked: pixels that the draft model guessed are orange.
    """
    whole = np.ones((lines * (SIDE + 1) - 1, CLASSES * (SIDE + 1) - 1, 3))
    for i, output in enumerate(outputs):
        ink = np.minimum(np.array(output.token_ids), LEVELS - 1).reshape(SIDE, SIDE, 1) / (LEVELS - 1)
        guessed = np.array([origin == "accepted" for origin in output.report.origins]).reshape(SIDE, SIDE, 1)
        paper = np.where(guessed & is_marked, (1.0, 0.85, 0.6), (0.93, 0.93, 0.93))
        top, left = (part * (SIDE + 1) for part in divmod(i, CLASSES))
        whole[top : top + SIDE, left : left + SIDE] = paper * (1 - ink)
    return whole


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Do all of it, and return the numbers, which are written to out/numbers.json, too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder for data, models and numbers")
    parser.add_argument("--picture", type=Path, help="file for the picture [default: OUT/digits.png]")
    parser.add_argument("--target-steps", type=int, default=1500)
    parser.add_argument("--draft-steps", type=int, default=2000)
    parser.add_argument("--own", type=int, default=2000, help="images of the target that the draft model learns from")
    parser.add_argument("--images", type=int, default=200, help="images that are compared one by one")
    parser.add_argument("--beginnings", type=int, default=20_000, help="draws of three pixels that are counted")
    parser.add_argument("--lines", type=int, default=6, help="of ten images in each part of the picture")
    parser.add_argument("--spec-length", type=int, action="append", help="pixels drafted per pass; may be repeated")
    parser.add_argument("--trained", action="store_true", help="take the models that are in OUT already")
    given = parser.parse_args(arguments)
    lengths = given.spec_length or [1, 2, 3, 5, 8]
    if not given.trained:
        train(given.out, given.target_steps, given.draft_steps, given.own)
    numbers: dict[str, Any] = {"bits_per_pixel": held_out_bits(given.out)}
    numbers["speculation"] = {
        k: speculation(draw(opened(given.out, "draft", spec_length=k), given.images, acceptance="ratio"))
        for k in lengths
    }
    numbers["check"] = check(given.out, given.images, given.beginnings, lengths[len(lengths) // 2])
    (given.out / "numbers.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(numbers, indent=2))
    picture(given.out, given.picture or given.out / "digits.png", lengths[len(lengths) // 2], given.lines)
    prompts = [{"id": f"digit {digit}", "ids": [class_id(digit)]} for digit in range(CLASSES)]
    text = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    (given.out / "prompts.jsonl").write_text(text, encoding="utf-8")
    return numbers


if __name__ == "__main__":
    main()
