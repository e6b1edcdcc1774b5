"""Two sites fine-tune one adapter (LoRA, arXiv 2106.09685) of a language model together.

    python lora.py [--rounds=5] [--sync-every=10] [--members=2]

The base model is frozen and the same at each site, so only the adapter crosses the network: here less than a tenth of
the parameters, with real models less than a hundredth. The code is that of transformers and peft. The model is tiny
and has random weights, so that the example downloads nothing: put a model of yours into base_model().
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import longhaul as lh


def base_model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same weights at each site
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    )


def batch(text: bytes, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - 64, (8,), generator=generator)
    return torch.stack(
        [torch.frombuffer(bytearray(text[start : start + 64]), dtype=torch.uint8) for start in starts]
    ).long()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tunes an adapter together with other sites.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sync-every", type=int, default=10, help="steps of a site between two exchanges")
    parser.add_argument("--members", type=int, default=None, help="begin with this many members; default: alone")
    options = parser.parse_args()

    model = get_peft_model(base_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inner = torch.optim.AdamW(trained, lr=1e-3)
    text = argparse.__doc__.encode() * 10
    comm = lh.join("lora", timeout=None, members=options.members)
    passages = torch.Generator().manual_seed(comm.member_id)  # other passages at each site
    with lh.torch.DiLoCo(comm, model, inner, sync_every=options.sync_every) as diloco:
        while diloco.round < options.rounds:
            tokens = batch(text, passages)
            loss = model(input_ids=tokens, labels=tokens).loss
            inner.zero_grad()
            loss.backward()
            inner.step()  # the last step of a round exchanges the adapter
    share = sum(p.numel() for p in trained) / sum(p.numel() for p in model.parameters())
    print(f"{diloco.round} rounds, loss {loss:.3f}, {share:.1%} of the parameters exchanged, state {diloco.state.hash}")
    comm.leave()


if __name__ == "__main__":
    main()
