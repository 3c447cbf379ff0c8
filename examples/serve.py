"""Answer requests in a batch that changes: they join and leave between steps, each computed as if it were alone."""

import torch

from flexnsa.lm import DecoderLM, Sampling, preset


def main(lengths: tuple[int, ...] = (40, 7, 25), new_tokens: tuple[int, ...] = (9, 5, 7), batch_size: int = 2) -> None:
    torch.manual_seed(0)
    model = DecoderLM(preset("small", num_layers=2)).eval()
    prompts = [torch.randint(256, (length,)) for length in lengths]
    answers: list[list[int]] = [[] for _ in prompts]
    waiting = list(range(len(prompts)))
    running: dict[int, int] = {}  # the request of each row of the cache
    newest = torch.zeros(batch_size, 1, dtype=torch.int64)

    with torch.no_grad():
        served = model.new_caches(batch_size, max_seq_len=max(map(sum, zip(lengths, new_tokens, strict=True))))
        while waiting or running:
            free = [row for row in range(batch_size) if row not in running][: len(waiting)]
            if free:  # prefill new requests as one pack
                joining = [waiting.pop(0) for _ in free]
                sizes = torch.tensor([len(prompts[request]) for request in joining])
                packed = torch.cat([prompts[request] for request in joining])[None]
                prefilled = model.new_caches(len(free), int(sizes.max()))
                document_ids = torch.arange(len(free)).repeat_interleave(sizes)[None]
                logits = model(packed, document_ids=document_ids, caches=prefilled)
                newest[free, 0] = logits[0, sizes.cumsum(0) - 1].argmax(-1)
                for cache, other in zip(served, prefilled, strict=True):
                    cache.insert(free, other)
                running |= zip(free, joining, strict=True)
            for row, request in list(running.items()):
                answers[request].append(int(newest[row]))
                if len(answers[request]) == new_tokens[request]:
                    del running[row]
                    for cache in served:
                        cache.reset(row)
            active = torch.tensor([row in running for row in range(batch_size)]).int()
            newest = model(newest, caches=served, lengths=active).argmax(-1)

    for prompt, answer in zip(prompts, answers, strict=True):
        assert model.generate(prompt[None], len(answer), sampling=Sampling(temperature=0)) == [answer]
        print(f"{len(prompt)} tokens, answered by {len(answer)}")


if __name__ == "__main__":
    main()
