"""A chat whose past is never read again: each turn adds to one cache, and a token costs blocks and not the whole talk.

python examples/transformers/chat.py [folder of a converted model with a chat template]
"""

import sys
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TextStreamer

from flexnsa.lm.transformers_model import FlexNSAConfig, FlexNSAForCausalLM
from flexnsa.transformers import FlexNSACache

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"


def main(name: str | None = None, max_new_tokens: int = 40, turns: tuple[str, ...] = ("Hello!", "Say more.")) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer: Any = byte_tokenizer() if name is None else AutoTokenizer.from_pretrained(name)
    model: Any = untrained_model() if name is None else AutoModelForCausalLM.from_pretrained(name)
    model = model.to(device).eval()

    cache, talk = FlexNSACache(model.config), torch.zeros(1, 0, dtype=torch.int64, device=device)
    for turn in turns:
        print(f"> {turn}")
        message = [{"role": "user", "content": turn}]
        asked = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        new = tokenizer(asked, return_tensors="pt", add_special_tokens=False)["input_ids"].to(device)
        talk = torch.cat((talk, new), dim=1)
        seen = cache.get_seq_length()
        talk = model.generate(
            talk,
            attention_mask=torch.ones_like(talk),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            do_sample=True,
            streamer=TextStreamer(tokenizer, skip_prompt=True),
        )
        print(f"({cache.get_seq_length() - seen} tokens were read, {seen} of earlier turns were not read again)")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes, without a file."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


def untrained_model() -> FlexNSAForCausalLM:
    torch.manual_seed(0)
    return FlexNSAForCausalLM(FlexNSAConfig())


if __name__ == "__main__":
    main(*sys.argv[1:2])
