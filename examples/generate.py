"""Continue batches of prompts with one session: its caches, and on a GPU its CUDA graph, are made once for all."""

import time

import torch

from flexnsa.lm import DecoderLM, DecodingSession, Sampling, preset


def main(prompt_len: int = 1024, new_tokens: int = 64, batch_size: int = 4) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = DecoderLM(preset("small")).to(device).eval()
    sampling = Sampling(temperature=0.8, top_k=50)

    # On CUDA a step is captured now, in one graph for all lengths, and draws its tokens there. Elsewhere it is eager.
    begin = time.perf_counter()
    session = DecodingSession(model, batch_size, max_seq_len=prompt_len + new_tokens, sampling=sampling)
    print(f"a session of {session.steps} steps, made in {time.perf_counter() - begin:.1f} s")

    # Prompts may differ in length. A row ends at a stop: a token, or several in a row.
    prompts = torch.randint(256, (batch_size, prompt_len), device=device)
    lengths = torch.randint(1, prompt_len + 1, (batch_size,), device=device)
    stops = [0, b"\n\n"]
    for seed in (1, 2):
        begin = time.perf_counter()
        rows = session.generate(prompts, new_tokens, lengths=lengths, stop_tokens=stops, seed=seed)
        count, seconds = sum(map(len, rows)), time.perf_counter() - begin
        print(f"seed {seed}: {count} tokens in {seconds:.2f} s, prompts included; a row of {len(rows[0])}")

    # Tokens as they come, and in whose row; on CUDA in groups of 8, because to look at each would wait for each.
    streamed: list[list[int]] = [[] for _ in range(batch_size)]
    session.generate(
        prompts,
        new_tokens,
        lengths=lengths,
        stop_tokens=stops,
        seed=2,
        on_token=lambda row, token: streamed[row].append(token),
    )
    assert streamed == rows  # a seed repeats its draws

    # In one call, for a single batch; without a cache it runs the whole sequence again for every token.
    options = {"lengths": lengths[:1], "sampling": Sampling(temperature=0)}
    cached, uncached = (model.generate(prompts[:1], 8, cached=cached, **options) for cached in (True, False))
    assert cached == uncached


if __name__ == "__main__":
    main()
