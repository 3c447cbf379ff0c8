"""Generate with a cache: the prompt in chunks, then token by token, each step reading little of what came before."""

import time

import torch

from flexnsa.lm import DecoderLM, preset


@torch.no_grad()  # a cache keeps keys and values without their history, so nothing could be trained through it
def main(prompt_len: int = 4096, new_tokens: int = 32, chunk: int = 1024) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = DecoderLM(preset("small")).to(device).eval()
    prompt = torch.randint(256, (1, prompt_len), device=device)

    # One cache a layer, all of its memory allocated here: nothing grows while it decodes.
    caches = model.new_caches(batch_size=1, max_seq_len=prompt_len + new_tokens)

    # Prompt, chunk and step are one call: tokens that follow those in the cache, any number of them.
    for tokens in prompt.split(chunk, dim=1):
        logits = model(tokens, caches=caches)

    begin, generated = time.perf_counter(), []
    for _ in range(new_tokens):
        token = logits[:, -1:].argmax(-1)  # greedy; flexnsa.lm.Sampling has temperature, top-k and top-p
        generated.append(token.item())
        logits = model(token, caches=caches)
    print(f"{1000 * (time.perf_counter() - begin) / new_tokens:.1f} ms a token behind {prompt_len} tokens")

    # The tokens are those that a pass over the whole sequence would have chosen.
    whole = model(torch.cat((prompt, torch.tensor([generated], device=device)), dim=1))
    assert whole[0, prompt_len - 1 : -1].argmax(-1).tolist() == generated
    print(f"tokens {generated[:8]} ...; logits differ from such a pass by {(whole - logits)[:, -1].abs().max():.1e}")

    # A draft that was refused is taken back: all caches return to an earlier length.
    for cache in caches:
        cache.crop(prompt_len + new_tokens - 1)
    torch.testing.assert_close(model(token, caches=caches), logits)


if __name__ == "__main__":
    main()
