"""A pretrained model that attends by NSA, by one argument: exact while all blocks are selected, without any training.

python examples/transformers/long_context.py [folder or name of a Llama, Qwen, ...]
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import flexnsa.transformers  # noqa: F401  (registers "flexnsa")


def main(name: str | None = None, short: int = 1024, long: int = 8192) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = (random_llama() if name is None else AutoModelForCausalLM.from_pretrained(name)).to(device).eval()
    x = torch.randint(model.config.vocab_size, (1, long), device=device)

    with torch.no_grad():
        dense = model(x[:, :short], use_cache=False).logits
        seconds = time_of(model, x)

        # Of a model that is not loaded yet: from_pretrained(name, attn_implementation="flexnsa").
        model.set_attn_implementation("flexnsa")
        sparse = model(x[:, :short], use_cache=False).logits
        torch.testing.assert_close(sparse, dense, atol=1e-3, rtol=0)  # 16 blocks of 64 tokens are 1,024
        print(f"{long} tokens: {seconds:.2f} s with dense attention, {time_of(model, x):.2f} s with flexnsa")

        # Sizes stand in the config, are saved with it, and can be changed at any time.
        model.config.flexnsa = {"num_selected_blocks": 32, "num_local_blocks": 8}
        prompt = x[:, :short]
        new = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        print("new tokens:", new[0, short:].tolist())


def random_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=512, eos_token_id=None)
    return LlamaForCausalLM(config)


def time_of(model: torch.nn.Module, x: torch.Tensor) -> float:
    begin = time.perf_counter()
    model(x, use_cache=False, logits_to_keep=1).logits.sum().item()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(*sys.argv[1:2])
