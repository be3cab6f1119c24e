"""Stop texts in what a tokenizer with byte fallback writes, and in text that is held back to the end."""

import pytest
from tokenizers import Tokenizer as Backend, decoders, models

from forerun import LLM, SamplingParams
from tiny import write_tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A random model over bytes, whose tokenizer is of Llama 2's kind: id i + 1 is the byte token of i."""
    folder = write_tiny(tmp_path_factory.mktemp("stop") / "bytes")
    vocab = {"<|end|>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<|end|>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    return LLM(folder, draft="none", max_seq_len=64)


def always(byte: int, **options: object) -> SamplingParams:
    """Parameters of an output that is one byte, again and again."""
    return SamplingParams(temperature=0.0, logit_bias={byte + 1: 1000.0}, **options)


def check_first_token_stops(llm: LLM, params: SamplingParams, token: int) -> None:
    """Whether the text is read at the end or in pieces."""
    (out,) = llm.generate("a", params)
    assert (out.text, out.token_ids, out.finish_reason) == ("", [token], "stop")
    *_, last = llm.stream("a", params)
    assert (last.text, last.finish_reason) == ("", "stop")


def test_the_first_newline_of_a_run_of_byte_tokens_stops(llm: LLM) -> None:
    check_first_token_stops(llm, always(0x0A, max_tokens=20, stop=("\n",)), 0x0B)


def test_a_stream_does_not_hold_back_a_run_of_byte_tokens(llm: LLM) -> None:
    assert [chunk.text for chunk in llm.stream("a", always(0x0A, max_tokens=4))] == ["\n"] * 4


def test_a_stop_text_that_the_end_of_the_output_completes(llm: LLM) -> None:
    """Half a character at the end becomes U+FFFD when nothing follows."""
    check_first_token_stops(llm, always(0xE2, max_tokens=1, stop=("\ufffd",)), 0xE3)
    (whole,) = llm.generate("a", always(0xE2, max_tokens=1, stop=("x",)))
    assert (whole.text, whole.finish_reason) == ("\ufffd", "length")


def test_a_stop_text_is_looked_for_behind_the_least_number_of_tokens(llm: LLM) -> None:
    params = always(0x0A, max_tokens=20, min_tokens=3, stop=("\n",))
    (out,) = llm.generate("a", params)
    assert (out.text, len(out.token_ids), out.finish_reason) == ("\n\n\n", 4, "stop")
    assert "".join(chunk.text for chunk in llm.stream("a", params)) == "\n\n\n"
    (over,) = llm.generate("a", always(0x0A, max_tokens=20, min_tokens=3, stop=("\n\n",)))
    assert (over.text, len(over.token_ids)) == ("\n\n", 4)  # it begins within them and ends behind
    (short,) = llm.generate("a", always(0x0A, max_tokens=3, min_tokens=3, stop=("\n",)))
    assert (short.text, short.finish_reason) == ("\n\n\n", "length")
