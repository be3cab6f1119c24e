"""The speed of docs/use/functional.md: the shipped pair as modules of transformers, in processor seconds of a thread.

python docs/development/measure/functional_speed.py
"""

import json
import time

import torch
import transformers

from forerun import SamplingParams
from forerun.functional import speculate_with
from forerun.models.loading import load_checkpoint
from forerun.models.named import DATA

NUM_PROMPTS, NUM_TOKENS, REPETITIONS = 8, 64, 3


def timed(run):
    """The least processor seconds of some runs, in which waiting for other processes does not count; and the result."""
    found = []
    for _ in range(REPETITIONS):
        began = time.process_time()
        result = run()
        found.append(time.process_time() - began)
    return min(found), result


def module_of(name):
    """A model of the pair as a module, with the numbers that its weights stand for."""
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(DATA / name))
    module.load_state_dict(load_checkpoint(DATA / name, dtype="float32").model.weights, strict=False)
    module.tie_weights()
    return module.eval()


torch.set_num_threads(1)
target, draft = map(module_of, ("target", "draft"))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(DATA / "target" / "tokenizer.json"))
lines = (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
texts = [json.loads(line)["text"] for line in lines[:NUM_PROMPTS]]
params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


def plain():
    """What generate() says."""
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    inputs = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    return [target.generate(ids, **options)[0, ids.shape[1] :].tolist() for ids in inputs]


plain()  # warms up
plain_s, expected = timed(plain)
print(f"generate() of transformers {transformers.__version__}: {plain_s:.2f} s")
for name, options in {
    "none": {"draft": "none"},
    "suffix": {"draft": "suffix"},
    "draft module": {"draft": draft},
    "draft module, fixed": {"draft": draft, "pacing_policy": "fixed"},
}.items():
    # Made anew for each run: a drafter may remember the texts of the run before.
    seconds, outs = timed(lambda: speculate_with(target, tokenizer, **options).generate(texts, params))  # noqa: B023
    same = sum(out.token_ids == ids for out, ids in zip(outs, expected, strict=True))
    length = sum(out.report.num_emitted for out in outs) / sum(out.report.num_steps for out in outs)
    print(f"{name}: {seconds:.2f} s, {plain_s / seconds:.2f} times; {length:.2f} tokens per pass", end="")
    print(f", {same} of {NUM_PROMPTS} texts equal")
