"""Speculation for a model of transformers that is in memory already: `python examples/transformers_one_line.py`.

Any architecture of transformers will do; here it is a tiny GPT-2 with random weights; yours comes
from AutoModelForCausalLM.from_pretrained(...). It needs `pip install '.[hf]'`.
"""

import sys

try:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError as error:
    from forerun.errors import pip_for

    sys.exit(f"this example needs {error.name}: {pip_for('hf')}")

from forerun import SamplingParams
from forerun.functional import speculate_with


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    prompt = [5, 9, 12, 5, 9]

    fast = speculate_with(model, draft="suffix")  # a tokenizer as second argument: then texts and conversations, too
    out = fast.generate(prompt, SamplingParams(max_tokens=48, temperature=0))

    plain = model.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False, pad_token_id=0)
    print("the same tokens:", out.token_ids == plain[0, len(prompt) :].tolist())
    print(f"{out.report.mean_accepted_length:.2f} tokens per call of the model")


if __name__ == "__main__":
    main()
