"""What type checkers take of a caller, and what they refuse: mypy reads this file with the package and nothing runs it.

Each `type: ignore` is one that mypy wants: where it no longer refuses a call, it says that the comment is unused.
"""

from pathlib import Path

from forerun import LLM, EngineConfig, SamplingParams

SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2], bad_words="c", logit_bias={1: 2})
SamplingParams(stop="a", stop_token_ids=(1,))
SamplingParams(max_token=3)  # type: ignore[call-arg]
SamplingParams(stop=3)  # type: ignore[arg-type]
llm = LLM(Path("x"), draft="none", max_batch_size=4, ignore_config_keys=["a"], speculative_config={"model": "y"})
LLM("x", draught="none")  # type: ignore[call-arg]
LLM("x", max_batch_size="4")  # type: ignore[arg-type]
reveal: list[str] = [output.text for output in llm.generate("x", SamplingParams(temperature=0))]
llm.generate("x", temperature=0)  # type: ignore[call-arg]
LLM.from_config(EngineConfig(target="x"))
